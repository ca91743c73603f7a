"""Norms, linear layers, embeddings and heads on one rank, and each rank's part of them without a communicator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_world import CPU, build_plan, fill, layer_info, plain

from jackfield.distributed import SingleCommunicator
from jackfield.errors import CheckpointError, ConfigError
from jackfield.interfaces import OPS, MoEConfig, OutputShard, Parallel, RankInfo
from jackfield.layers.activation import GATED, gated_op
from jackfield.layers.builder import LayerBuilder
from jackfield.layers.linear import Linear
from jackfield.layers.norm import LayerNorm, RmsNorm

QKV = (
    OutputShard("q", 16, unit=4),
    OutputShard("k", 8, unit=4, may_replicate=True),
    OutputShard("v", 8, unit=4, may_replicate=True),
)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def builder() -> LayerBuilder:
    return LayerBuilder(build_plan(SingleCommunicator()))


@pytest.mark.parametrize("bias", [False, True])
def test_a_fused_linear_is_its_matrices_one_after_another(bias: bool) -> None:
    layer = builder().linear("layer", 6, QKV, bias=bias, parallel=Parallel.COLUMN)
    tensors = {f"{s.name}.weight": numbers(s.size, 6, seed=i) for i, s in enumerate(QKV)}
    if bias:
        tensors |= {f"{s.name}.bias": numbers(s.size, seed=9 + i) for i, s in enumerate(QKV)}
    fill(layer, dict(reversed(tensors.items())))
    x = numbers(5, 6, seed=20)
    parts = []
    for shard in QKV:
        part = x.double() @ tensors[f"{shard.name}.weight"].double().T
        parts.append(part + tensors[f"{shard.name}.bias"].double() if bias else part)
    close(layer(x), torch.cat(parts, -1))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.sampled_from([1, 2, 4]))
def test_the_ranks_parts_make_the_whole(data: st.DataObject, size: int) -> None:
    """COLUMN parts concatenate, ROW parts add up; heads of the cache may be copied to neighbours."""
    unit, kv_units = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 2, 4]))
    shards = (
        OutputShard("q", 4 * unit * data.draw(st.integers(1, 2)), unit=unit),
        OutputShard("k", kv_units * unit, unit=unit, may_replicate=True),
    )
    tensors = {f"{s.name}.weight": numbers(s.size, 5, seed=i) for i, s in enumerate(shards)}
    tensors |= {f"{s.name}.bias": numbers(s.size, seed=5 + i) for i, s in enumerate(shards)}
    x = numbers(3, 5, seed=11)
    for rank in range(size):
        info = layer_info(shards, 5, Parallel.COLUMN, RankInfo(rank, size), bias=True)
        layer = Linear(info, plain(info), SingleCommunicator(), CPU)
        fill(layer, tensors)
        at = 0
        got = layer(x)
        for shard in shards:
            units = shard.size // shard.unit
            mine = range(
                rank * units // size * shard.unit,
                max(rank * units // size + 1, (rank + 1) * units // size) * shard.unit,
            )
            whole = x.double() @ tensors[f"{shard.name}.weight"].double().T + tensors[f"{shard.name}.bias"].double()
            close(got[:, at : at + len(mine)], whole[:, list(mine)])
            at += len(mine)
        assert at == got.shape[1]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parts_add_up(size: int) -> None:
    weight, x = numbers(3, 8), numbers(4, 8, seed=1)
    total = torch.zeros(4, 3, dtype=torch.float64)
    for rank in range(size):
        info = layer_info((OutputShard("", 3),), 8, Parallel.ROW, RankInfo(rank, size), input_unit=2)
        layer = Linear(info, plain(info), SingleCommunicator(), CPU)
        fill(layer, {"weight": weight})
        share = 8 // size
        total += layer(x[:, rank * share : (rank + 1) * share]).double()
    close(total, x.double() @ weight.double().T)


def test_units_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match="3 units of 'q' cannot be divided among 2 ranks"):
        OutputShard("q", 12, unit=4).slice(RankInfo(0, 2))


def test_embedding_and_head() -> None:
    table, bias = numbers(10, 4), numbers(10, seed=1)
    made = builder()
    embedding = made.embedding("embed", 10, 4)
    fill(embedding, {"weight": table})
    ids = torch.tensor([3, 0, 9, 3])
    assert torch.equal(embedding(ids), table[ids])
    head = made.head("head", 10, 4, bias=True)
    fill(head, {"weight": table, "bias": bias})
    x = numbers(3, 4, seed=2)
    close(head(x), x.double() @ table.double().T + bias.double())


def test_a_tied_head_uses_the_embedding_and_owns_nothing() -> None:
    made = builder()
    embedding = made.embedding("embed", 10, 4)
    head = made.head("head", 10, 4, tied=embedding)
    assert list(head.parameters()) == [] and head.unfilled() == []
    fill(embedding, {"weight": numbers(10, 4)})
    x = numbers(3, 4, seed=2)
    close(head(x), x.double() @ numbers(10, 4).double().T)


def test_a_wrong_shape_names_the_parameter_and_both_shapes() -> None:
    layer = builder().linear("layers.0.qkv", 6, QKV, parallel=Parallel.COLUMN)
    with pytest.raises(CheckpointError) as caught:
        layer.load("k", "weight", torch.zeros(8, 5))
    error = caught.value
    assert error.message == "the shape of a checkpoint tensor does not fit layers.0.qkv.weight"
    assert error.value == (8, 5)
    assert error.remedy == "expected (8, 6); is the checkpoint of another size than its config says?"


@pytest.mark.parametrize("parallel", [Parallel.REPLICATED, Parallel.COLUMN])
def test_an_unknown_shard_names_those_there_are(parallel: Parallel) -> None:
    layer = builder().linear("layer", 6, QKV, parallel=parallel)
    with pytest.raises(CheckpointError) as caught:
        layer.load("gate", "weight", torch.zeros(8, 6))
    assert (caught.value.value, caught.value.remedy) == ("gate", "its shards are ['q', 'k', 'v']")


def test_an_unwanted_suffix_is_not_taken() -> None:
    layer = builder().linear("layer", 6, 4)
    assert layer.load("", "scales", torch.zeros(4, 6)) is False
    assert layer.load("", "bias", torch.zeros(4)) is False
    assert layer.unfilled() == ["layer.weight"]


def test_norms() -> None:
    made = builder()
    x, residual, weight, bias = numbers(3, 8), numbers(3, 8, seed=1), numbers(8, seed=2), numbers(8, seed=3)
    total = x.double() + residual.double()
    rms = made.norm("norm", 8, 1e-5, offset=1.0)
    assert isinstance(rms, RmsNorm)
    fill(rms, {"weight": weight})
    rms.finalize()  # a second time changes nothing
    expected = total / (total.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + 1)
    close(rms.add(x, residual)[0], expected)
    close(rms.add(x, residual)[1], total)
    close(rms(x + residual), expected)
    layer = made.norm("norm", 8, 1e-5, kind="layer")
    assert isinstance(layer, LayerNorm)
    fill(layer, {"weight": weight, "bias": bias})
    centred = total - total.mean(-1, keepdim=True)
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double() + bias.double()
    close(layer.add(x, residual)[0], expected)
    close(layer(x + residual), expected)


def test_equal_rotaries_are_shared() -> None:
    made = builder()
    first = made.rotary(8, theta=1e4, scaling=None, max_position=16)
    assert made.rotary(8, theta=1e4, scaling=None, max_position=16) is first
    assert made.rotary(8, theta=1e4, scaling={"rope_type": "linear", "factor": 2.0}, max_position=16) is not first


def test_activations_by_the_names_of_checkpoints() -> None:
    assert {GATED[name] for name in GATED} <= set(OPS)
    assert gated_op("silu") == "silu_and_mul"
    assert gated_op("gelu_pytorch_tanh") == "gelu_tanh_and_mul"
    with pytest.raises(ConfigError) as caught:
        gated_op("silux")
    assert (caught.value.field, caught.value.value, caught.value.remedy) == (
        "hidden_act",
        "silux",
        "did you mean 'silu'?",
    )


def test_heads_that_the_ranks_cannot_share_are_a_config_error() -> None:
    class Three(SingleCommunicator):
        size = 3

    with pytest.raises(ConfigError) as caught:
        LayerBuilder(build_plan(Three())).local_heads(4)
    assert caught.value.field == "parallel.tensor_parallel_size"
    assert caught.value.value == 3
    assert caught.value.remedy == "use a divisor of 4"


def test_experts_without_a_backend_are_a_config_error() -> None:
    made = LayerBuilder(replace(build_plan(SingleCommunicator()), experts=None))
    with pytest.raises(ConfigError, match="the model has experts, but no experts backend was chosen"):
        made.moe("moe", MoEConfig(num_experts=2, top_k=1, hidden_size=4, intermediate_size=4))
