"""Every checkpoint format: what is loaded is what the format's own library, or plain arithmetic, says it is."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest
import torch
from quantized_writers import FORMATS, Format
from stored_world import PATH, Rank, linear, method_named, named

from jackfield.errors import CheckpointError
from jackfield.interfaces import OutputShard, Parallel
from jackfield.layers.linear import Linear

INPUTS = 128
SINGLE = (OutputShard("o_proj", 64),)
FUSED = (
    OutputShard("q_proj", 64, unit=16),
    OutputShard("k_proj", 32, unit=16, may_replicate=True),
    OutputShard("v_proj", 32, unit=16, may_replicate=True),
)
HQQ_SETTINGS = (
    *("channel_wise", "optimize", "packing", "view_as_float", "quant_scale", "quant_zero", "offload_meta"),
    *("round_zero", "encoded_state_dict", "stores_quant_config"),
)
"""What HQQ's writer notes, and no number depends on."""
NEEDLESS = {"modelopt-int4-fp8-awq": "weight_scale_2", "quark-nvfp4": "input_scale_2"}
"""What some formats have for activations, and others need."""
EVERY = pytest.mark.parametrize("name", FORMATS)


def weight_of(outputs: int, inputs: int = INPUTS, seed: int = 0) -> torch.Tensor:
    """Return weights whose sizes differ between outputs and inputs, so that scales do too."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.logspace(-1, 0.5, outputs).unsqueeze(1), torch.logspace(0, 0.5, inputs)
    return torch.randn(outputs, inputs, generator=generator) * rows * columns


@cache
def written(kind: Format, shards: tuple[OutputShard, ...]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the checkpoint tensors of all shards, and the stacked matrix that they mean."""
    tensors: dict[str, torch.Tensor] = {}
    meanings = []
    for seed, shard in enumerate(shards):
        found, meaning = kind.write(weight_of(shard.size, seed=seed) * (seed + 1))
        tensors |= named(f"{PATH}.{shard.name}", found)
        meanings.append(meaning)
    return tensors, torch.cat(meanings)


def loaded(
    kind: Format,
    tensors: Mapping[str, torch.Tensor],
    shards: tuple[OutputShard, ...],
    parallel: Parallel = Parallel.REPLICATED,
    rank: Rank | None = None,
) -> Linear:
    return linear(method_named(kind.method), kind.config, tensors, INPUTS, shards, parallel=parallel, rank=rank)


@EVERY
def test_a_product_is_that_of_what_is_stored(name: str) -> None:
    tensors, meaning = written(FORMATS[name], SINGLE)
    layer = loaded(FORMATS[name], tensors, SINGLE)
    weight = layer.scheme.dequantize(layer)
    torch.testing.assert_close(weight, meaning, rtol=1e-6, atol=1e-7)
    x = torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(9))
    torch.testing.assert_close(layer(x), x @ meaning.t(), rtol=1e-5, atol=1e-4)


@EVERY
def test_fused_layers_keep_the_scales_of_each_matrix(name: str) -> None:
    tensors, meaning = written(FORMATS[name], FUSED)
    layer = loaded(FORMATS[name], tensors, FUSED)
    torch.testing.assert_close(layer.scheme.dequantize(layer), meaning, rtol=1e-6, atol=1e-7)


@EVERY
@pytest.mark.parametrize("size", [2, 4])
def test_outputs_cut_and_loaded_are_loaded_and_cut(name: str, size: int) -> None:
    """With four ranks, two hold each of the two key and value heads."""
    tensors, _ = written(FORMATS[name], FUSED)
    whole = loaded(FORMATS[name], tensors, FUSED)
    parts = whole.scheme.dequantize(whole).split([shard.size for shard in FUSED])
    for rank in range(size):
        own = loaded(FORMATS[name], tensors, FUSED, Parallel.COLUMN, Rank(rank, size))
        slices = [shard.slice(own.info.rank) for shard in FUSED]
        expected = torch.cat([part[start:stop] for part, (start, stop) in zip(parts, slices, strict=True)])
        assert torch.equal(own.scheme.dequantize(own), expected)


@EVERY
@pytest.mark.parametrize("size", [2, 4])
def test_inputs_cut_and_loaded_are_loaded_and_cut(name: str, size: int) -> None:
    """Groups of 64 and blocks of 40 are cut through by four ranks."""
    tensors, meaning = written(FORMATS[name], SINGLE)
    whole = loaded(FORMATS[name], tensors, SINGLE)
    x = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(9))
    total, step = torch.zeros(3, 64), INPUTS // size
    for rank in range(size):
        own = loaded(FORMATS[name], tensors, SINGLE, Parallel.ROW, Rank(rank, size))
        part = slice(rank * step, (rank + 1) * step)
        assert torch.equal(own.scheme.dequantize(own), whole.scheme.dequantize(whole)[:, part])
        total += own(x[:, part])
    torch.testing.assert_close(total, x @ meaning.t(), rtol=1e-5, atol=1e-4)


@EVERY
def test_a_tensor_that_nothing_takes_is_named(name: str) -> None:
    found, _ = written(FORMATS[name], SINGLE)
    tensors = {**found, f"{PATH}.o_proj.weight_surprise": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"used by nothing: .*o_proj\.weight_surprise"):
        loaded(FORMATS[name], tensors, SINGLE)


@EVERY
def test_a_tensor_that_is_absent_is_named(name: str) -> None:
    """Without it numbers would be others: nothing is guessed, and packed numbers are never taken for weights."""
    tensors, _ = written(FORMATS[name], SINGLE)
    needless = ("input_scale", "weight_shape", "g_idx", "pre_quant_scale", "act_pre_scale", *HQQ_SETTINGS)
    needless += (NEEDLESS.get(name, "input_scale"),)
    for absent in tensors:
        if not absent.endswith(needless):
            rest = {key: tensor for key, tensor in tensors.items() if key != absent}
            with pytest.raises(CheckpointError, match=r"o_proj|layer"):
                loaded(FORMATS[name], rest, SINGLE)
