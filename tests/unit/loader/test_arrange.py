"""Fused, transposed and reordered checkpoint tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jackfield.distributed import SingleCommunicator
from jackfield.errors import CheckpointError
from jackfield.interfaces import (
    LayerInfo,
    LinearScheme,
    OutputShard,
    Parallel,
    ParameterSpec,
    RowOrder,
    RowSlice,
    WeightRule,
)
from jackfield.layers.linear import Linear
from jackfield.loader.arrange import arrange, cut_rows, reorder_rows
from jackfield_quantization.unquantized import Unquantized

CPU = torch.device("cpu")
INFO = LayerInfo("layer", 6, (OutputShard("q", 8, unit=4), OutputShard("k", 4, unit=4)), Parallel.COLUMN, bias=True)


def linear(scheme: LinearScheme | None = None) -> Linear:
    return Linear(INFO, scheme or Unquantized.scheme(INFO, None), SingleCommunicator(), CPU)


class Packed(LinearScheme):
    """Two outputs in each stored number, along the second dimension; and a scale for the whole matrix."""

    def parameters(self, info: LayerInfo) -> tuple[ParameterSpec, ...]:
        shape = (info.input_size, sum(info.local_output_sizes) // 2)
        return (
            ParameterSpec("qweight", "qweight", shape, "int32", output_dim=1, input_dim=0, output_pack=2),
            ParameterSpec("scale", "scale", (1,), "float32", output_dim=None, input_dim=None),
        )


class Blocks(LinearScheme):
    """A scale for every three outputs of a matrix, the last block cut short."""

    def parameters(self, info: LayerInfo) -> tuple[ParameterSpec, ...]:
        shape = (sum(info.local_output_sizes), 2)
        return (ParameterSpec("scale", "scale", shape, "float32", output_dim=0, input_dim=None, output_repeat=3),)


def test_scales_of_blocks_go_where_their_rows_go() -> None:
    """Eight rows in two heads are three blocks: the ninth row of what blocks stand for is nobody's."""
    scales = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    each = scales.repeat_interleave(3, 0)[:8]
    rule = WeightRule("x", "layer", "q", rows=RowOrder("interleaved_pairs", 2))
    module = linear(Blocks())
    assert torch.equal(arrange(scales, rule, module, "scale"), reorder_rows(each, RowOrder("interleaved_pairs", 2)))
    assert torch.equal(arrange(scales, WeightRule("x", "layer", "q"), module, "scale"), each)


@pytest.mark.parametrize("width", [(), (5,)])
def test_rows_of_a_stacked_matrix(width: tuple[int, ...]) -> None:
    fused = torch.arange(12 * torch.Size(width).numel()).view(12, *width)
    assert torch.equal(cut_rows(fused, RowSlice(0, 8, 12)), fused[:8])
    assert torch.equal(cut_rows(fused, RowSlice(8, 12, 12)), fused[8:])


def test_rows_of_a_matrix_that_is_fused_head_by_head() -> None:
    heads, size = 3, 2
    parts = torch.randn((3, heads, size, 5), generator=torch.Generator().manual_seed(0))
    fused = parts.transpose(0, 1).reshape(-1, 5)
    for at, part in enumerate(parts):
        assert torch.equal(cut_rows(fused, RowSlice(at * size, (at + 1) * size, 3 * size, heads)), part.flatten(0, 1))


@pytest.mark.parametrize("rows", [11, 13, 24])
def test_a_fused_matrix_of_another_size_is_an_error(rows: int) -> None:
    with pytest.raises(CheckpointError) as caught:
        cut_rows(torch.ones(rows, 2), RowSlice(0, 8, 12))
    assert caught.value.message == (
        f"a checkpoint tensor does not fit its weight rule: {rows} rows instead of 1 times 12"
    )
    assert caught.value.field == "weight_map"


def test_a_transposed_matrix_is_turned_and_its_bias_is_not() -> None:
    module, rule = linear(), WeightRule("x", "layer", "k", cut=RowSlice(8, 12, 12), transposed=True)
    weight, bias = torch.randn(6, 12), torch.randn(12)
    assert torch.equal(arrange(weight, rule, module, "weight"), weight.t()[8:])
    assert torch.equal(arrange(bias, rule, module, "bias"), bias[8:])


def test_packed_rows_are_cut_where_they_run() -> None:
    module, rule = linear(Packed()), WeightRule("x", "layer", "k", cut=RowSlice(8, 12, 12))
    weight = torch.arange(36).view(6, 6)
    assert torch.equal(arrange(weight, rule, module, "qweight"), weight[:, 4:])
    scale = torch.ones(1)
    assert arrange(scale, rule, module, "scale") is scale


def test_packed_rows_that_cannot_be_told_apart_are_an_error() -> None:
    module = linear(Packed())
    with pytest.raises(CheckpointError, match="rows are packed 2 to a number, and a fused part does not begin"):
        arrange(torch.ones(6, 6), WeightRule("x", "layer", "q", cut=RowSlice(0, 7, 12)), module, "qweight")
    with pytest.raises(CheckpointError, match="rows are packed 2 to a number and cannot be put into another order"):
        rule = WeightRule("x", "layer", "q", RowOrder("interleaved_pairs", 2))
        arrange(torch.ones(6, 6), rule, module, "qweight")


def test_a_part_of_each_head_is_reordered() -> None:
    order = RowOrder("interleaved_pairs", 2, 4)
    rows = torch.arange(12)
    assert reorder_rows(rows, order).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


def test_weights_of_norms_over_heads_are_reordered_in_each_row() -> None:
    rows = torch.arange(12).view(2, 6)
    assert reorder_rows(rows, RowOrder("interleaved_pairs", 2)).tolist() == [[0, 2, 4, 1, 3, 5], [6, 8, 10, 7, 9, 11]]


@pytest.mark.parametrize("order", [RowOrder("interleaved_pairs", 5), RowOrder("interleaved_pairs", 2, 8)])
def test_rows_that_are_not_the_heads_of_the_rule_are_an_error(order: RowOrder) -> None:
    with pytest.raises(CheckpointError, match="12 rows are not"):
        reorder_rows(torch.ones(12, 3), order)


def test_experts_are_arranged_one_by_one() -> None:
    info = replace(INFO, bias=False, num_experts=3)
    module = Linear(info, Unquantized.scheme(info, None), SingleCommunicator(), CPU)
    assert module.row_place("q", "weight") == (0, 1)
