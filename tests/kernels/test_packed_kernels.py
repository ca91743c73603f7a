"""Products with four-bit weights in Triton against products with the same weights expanded."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from quantized_writers import FORMATS
from stored_world import PATH, linear, named

from jackfield.interfaces import OutputShard
from jackfield_quantization import triton_packed_launch
from jackfield_quantization.stored import Integers
from jackfield_quantization.triton_packed import (
    TritonAutoRound,
    TritonAwq,
    TritonCompressedTensors,
    TritonGptq,
)
from jackfield_quantization.triton_packed_launch import (
    Packed,
    PackedShape,
    counters_needed,
    has_copy_engine,
    packed_product,
    packed_shape,
    sliced_shape,
    splits_used,
)
from jackfield_quantization.triton_packed_scheme import as_words, decoded_codes, in_order, unpacked

CASES = {
    "one row": (1, 40, 256, 128),
    "few rows": (7, 96, 384, 128),
    "a group is all columns": (3, 33, 256, 256),
    "groups of 64": (16, 40, 256, 64),
    "groups of 32": (5, 40, 256, 32),
    "groups of 16": (2, 40, 128, 16),
    "some rows": (50, 70, 256, 128),
    "many rows": (150, 140, 256, 64),
}


def random_matrix(outputs: int, inputs: int, group: int, seed: int = 0) -> Integers:
    """Return numbers of four bits less a zero point of each group."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(inputs) // group
    numbers = torch.randint(0, 16, (outputs, inputs), generator=generator)
    zeros = torch.randint(0, 16, (outputs, inputs // group), generator=generator)
    scales = torch.rand(outputs, inputs // group, generator=generator).half().float()
    return Integers(numbers - zeros[:, groups], scales, groups)


def packed_of(matrix: Integers) -> Packed:
    found = in_order(matrix)
    assert found is not None
    made = as_words(*found[:3])
    assert made is not None
    return Packed(*made, found[2])


def wide(matrix: Integers, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (matrix.values.float() * matrix.scales[:, matrix.groups]).to(dtype).double()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("case", CASES)
def test_it_equals_the_expanded_product(case: str) -> None:
    rows, outputs, inputs, group = CASES[case]
    matrix = random_matrix(outputs, inputs, group)
    x, bias = torch.randn(rows, inputs), torch.randn(outputs)
    counters = torch.zeros(counters_needed(outputs), dtype=torch.int32)
    for given in (None, bias):
        out = torch.full((rows, outputs), float("nan"))
        packed_product(x, packed_of(matrix), given, out, packed_shape(rows, outputs, 4, False), counters)
        wanted = x.double() @ wide(matrix).t()
        assert error(out, wanted if given is None else wanted + bias.double()) < 1e-6
    assert not counters.any()


SHARED = {
    "few rows": PackedShape(32, 8, 1, 2, 2, few=True),
    "few rows, uneven": PackedShape(32, 16, 4, 2, 3, few=True),
    "many rows": PackedShape(32, 16, 4, 2, 2),
    "many rows, uneven": PackedShape(32, 16, 4, 2, 3),
    "copy engine": PackedShape(32, 16, 4, 2, 2, tma=True),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("group", [128, 64])
def test_parts_come_together(name: str, group: int) -> None:
    matrix = random_matrix(40, 512, group)
    x, counters = torch.randn(4, 512, dtype=torch.float16), torch.zeros(2, dtype=torch.int32)
    for _ in range(2):
        out = torch.full((4, 40), float("nan"), dtype=torch.float16)
        packed_product(x, packed_of(matrix), None, out, SHARED[name], counters)
        assert error(out, x.double() @ wide(matrix, torch.float16).t()) < 1e-3
        assert not counters.any()


@pytest.mark.parametrize("rows", [17, 70])
def test_the_copy_engine_stops_at_the_last_rows(rows: int) -> None:
    matrix = random_matrix(70, 256, 128)
    x, counters = torch.randn(rows, 256), torch.zeros(1, dtype=torch.int32)
    out = torch.full((rows, 70), float("nan"))
    packed_product(x, packed_of(matrix), None, out, PackedShape(64, 32, 4, 2, tma=True), counters)
    assert error(out, x.double() @ wide(matrix).t()) < 1e-6


class Slices:
    """Does in float64 what ``sliced_kernel`` says that it does, from the arguments of a launch."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.run(grid, *args, **options)

    def run(
        self,
        grid: tuple[int, ...],
        x: torch.Tensor,
        weight: torch.Tensor,
        codes: torch.Tensor,
        bias: torch.Tensor,
        out: torch.Tensor,
        *sizes: int,
        **how: Any,
    ) -> None:
        rows, outputs, inputs, x_row, out_row = sizes
        assert grid == (-(-outputs // 16),) and rows <= how["ROWS"] and how["num_warps"] == how["WARPS"]
        assert how["ROWS"] in (8, 16) and how["SLICES"] % how["WARPS"] == 0 and inputs % 128 == 0
        assert how["GROUP"] % (32 * how["PER"]) == 0 and (how["PER"] == 4 or how["GROUP"] % (64 * how["PER"]))
        scales, zeros = (found.t().repeat_interleave(how["GROUP"], 1) for found in decoded_codes(codes))
        wide = ((unpacked(weight).float() - zeros) * scales).double()
        wanted = torch.as_strided(x, (rows, inputs), (x_row, 1)).double() @ wide.t()
        wanted += bias.double() if how["BIAS"] else 0
        torch.as_strided(out, (rows, outputs), (out_row, 1), out.storage_offset()).copy_(wanted)


@pytest.mark.parametrize("group", [256, 128, 64, 32])
@pytest.mark.parametrize("rows", [1, 9])
def test_few_rows_in_slices(monkeypatch: pytest.MonkeyPatch, rows: int, group: int) -> None:
    """The kernel itself runs on a device alone (``tests/device``), and is compiled without one (ahead of time)."""
    module = ModuleType("jackfield_quantization.gluon_packed_kernels")
    module.sliced_kernel = Slices()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    matrix, bias = random_matrix(40, 512, group), torch.randn(40, dtype=torch.float16)
    x, whole = torch.randn(rows, 600, dtype=torch.float16)[:, :512], torch.zeros(rows, 50, dtype=torch.float16)
    for given in (None, bias):
        packed_product(x, packed_of(matrix), given, whole[:, 5:45], sliced_shape(rows, 40, 4), torch.zeros(1))
        wanted = x.double() @ wide(matrix).t() + (0 if given is None else given.double())
        assert error(whole[:, 5:45], wanted) < 1e-3
        assert not whole[:, :5].any() and not whole[:, 45:].any()


def test_where_programs_are_few_more_is_on_its_way() -> None:
    assert [sliced_shape(rows, 4096, 132).block_t for rows in (1, 8, 9, 16)] == [8, 8, 16, 16]
    assert [sliced_shape(1, outputs, 132).slices for outputs in (4096, 6144, 24576)] == [16, 8, 8]


def test_so_many_rows_go_to_slices_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_packed_launch, "SLICED_ROWS", 9)
    assert packed_shape(9, 4096, 132, True, sliced=True) == sliced_shape(9, 4096, 132)
    for rows, sliced in ((10, True), (9, False)):
        assert packed_shape(rows, 4096, 132, True, sliced=sliced).slices == 0


def test_launches_are_those_that_were_measured() -> None:
    chosen = {
        (rows, outputs): packed_shape(rows, outputs, 132, True)
        for rows in (1, 16, 32, 64, 128, 256)
        for outputs in (4096, 6144, 24576)
    }
    splits = {rows: [chosen[rows, outputs].splits for outputs in (4096, 6144, 24576)] for rows, _ in chosen}
    assert splits == {1: [8, 8, 2], 16: [4, 4, 1], 32: [4, 4, 1], 64: [4, 2, 1], 128: [4, 2, 1], 256: [2, 1, 1]}
    assert chosen[64, 24576].block_o == 128 and chosen[64, 6144].block_o == 64
    for (rows, outputs), shape in chosen.items():
        assert shape.few == (rows <= 32) and shape.tma == (rows > 32) and shape.block_t >= rows
        assert counters_needed(outputs) >= -(-outputs // shape.block_o)
    assert packed_shape(3000, 64, 132, True).splits == packed_shape(3000, 64, 132, False).splits == 1
    assert not packed_shape(300, 4096, 132, False).tma


def test_splits_all_have_a_tile() -> None:
    assert [splits_used(tiles, 8) for tiles in (1, 3, 8, 12, 32)] == [1, 3, 8, 6, 8]


def test_the_copy_engine_is_that_of_capability_9_and_10() -> None:
    assert [has_copy_engine(capability) for capability in ((8, 9), (9, 0), (10, 0), (12, 0))] == [
        False,
        True,
        True,
        False,
    ]


METHODS = {
    "gptq-4": TritonGptq,
    "gptq-4-wide": TritonGptq,
    "gptq-4-whole": TritonGptq,
    "gptq-4-order": TritonGptq,
    "gptq-8": TritonGptq,
    "awq": TritonAwq,
    "ct-w4-group": TritonCompressedTensors,
    "ct-w4-asymmetric": TritonCompressedTensors,
    "ct-w8-group": TritonCompressedTensors,
    "auto-round": TritonAutoRound,
}
SHARDS = (OutputShard("q_proj", 64), OutputShard("k_proj", 32))


def with_bfloat16_scales(
    stored: dict[str, torch.Tensor], meaning: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the same checkpoint with scales as checkpoints of models in bfloat16 have them."""
    scale = stored["weight_scale"].float()
    rounded = scale.bfloat16().float()
    repeat = meaning.shape[1] // scale.shape[1]
    return {**stored, "weight_scale": rounded}, meaning * (rounded / scale).repeat_interleave(repeat, 1)


@pytest.mark.parametrize("name", METHODS)
def test_checkpoints_mean_what_they_say(name: str) -> None:
    kind, tensors, meanings = FORMATS[name], {}, []
    for seed, shard in enumerate(SHARDS):
        weight = torch.randn(shard.size, 128, generator=torch.Generator().manual_seed(seed)) * (seed + 1)
        stored, meaning = kind.write(weight)
        if name.startswith("ct-w4"):
            stored, meaning = with_bfloat16_scales(stored, meaning)
        tensors |= named(f"{PATH}.{shard.name}", stored)
        meanings.append(meaning)
    layer = linear(METHODS[name], kind.config, tensors, 128, SHARDS)
    wanted = torch.cat(meanings)
    kept = {parameter.dtype for parameter in layer.parameters()}
    # Eight bits do not fit, nor do two matrices whose inputs are in different orders.
    assert (torch.int16 in kept) == (name not in ("gptq-8", "ct-w8-group"))
    torch.testing.assert_close(layer.scheme.dequantize(layer), wanted, rtol=1e-6, atol=1e-7)
    for shape in ((5, 128), (2, 3, 128)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(9))
        torch.testing.assert_close(layer(x), x @ wanted.t(), rtol=1e-5, atol=1e-4)


def test_bytes_hold_every_number() -> None:
    matrix = random_matrix(9, 256, 32)
    packed = packed_of(matrix)
    numbers = unpacked(packed.numbers).int() - decoded_codes(packed.codes)[1].t().int()[:, matrix.groups]
    assert torch.equal(numbers, matrix.values.int())


def test_inputs_out_of_order_are_put_beside_one_another() -> None:
    matrix = random_matrix(9, 256, 32)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(2))
    shuffled = Integers(matrix.values[:, order], matrix.scales, matrix.groups[order])
    found = in_order(shuffled)
    assert found is not None and found[2] == 32
    values, scales, _, back = found
    again = values.float() * scales[:, torch.arange(256) // 32]
    assert torch.equal(again, wide(shuffled).float()[:, back])


def test_what_does_not_fit_is_left_alone() -> None:
    matrix = random_matrix(9, 256, 32)
    assert as_words(matrix.values * 3, matrix.scales, 32) is None
    assert as_words(matrix.values[:, :96], matrix.scales[:, :3], 32) is None
    uneven = Integers(matrix.values, matrix.scales, torch.cat((torch.zeros(64, dtype=torch.int64), matrix.groups[64:])))
    assert in_order(uneven) is None
    # Scales of more bits than bfloat16 and float16 have, and zero points that 128 cannot be added to.
    assert as_words(matrix.values, matrix.scales * 1.0000001, 32) is None
    assert as_words(matrix.values - 130, matrix.scales, 32) is None
