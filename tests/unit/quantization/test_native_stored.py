"""Whole numbers that stay packed: exact, small, and dense where that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantized_writers import FORMATS, Format, awq, gptq
from stored_world import PATH, Rank, linear, method_named, named

from jackfield.interfaces import Band, OutputShard, Parallel, QuantizationRequest
from jackfield.layers.linear import Linear
from jackfield_native.toolchain import unavailable
from jackfield_quantization.native_stored_scheme import NativeStoredScheme

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="the kernels in C cannot be built here")
INPUTS = 128
SHARDS = (OutputShard("q_proj", 64), OutputShard("k_proj", 32), OutputShard("v_proj", 32))
WORDS = {
    "gptq-2": {"Q4_0"},
    "gptq-3": {"Q4_0"},
    "gptq-4": {"Q4_0"},
    "gptq-4-wide": {"Q8_0", "Q4_0"},
    "gptq-4-whole": {"Q4_0"},
    "gptq-4-v2": {"Q8_0", "Q4_0"},
    "gptq-8": {"F32"},
    "gptq-8-symmetric": {"Q8_0"},
    "gptq-4-order": {"F32"},
    "awq": {"Q8_0", "Q4_0"},
    "auto-round": {"Q8_0", "Q4_0"},
    "auto-round-gptq": {"Q4_0"},
    "auto-round-awq": {"Q8_0", "Q4_0"},
    "ct-w4-group": {"F32"},
    "ct-fp8-channel": {"F32"},
}
"""What each becomes. Scales of compressed-tensors are float32 here, which float16 does not hold; numbers of eight bits
less any zero point are no longer of eight bits.
"""


def checkpoint(kind: Format) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    meanings = []
    for seed, shard in enumerate(SHARDS):
        generator = torch.Generator().manual_seed(seed)
        found, meaning = kind.write(torch.randn(shard.size, INPUTS, generator=generator) * (seed + 1))
        tensors |= named(f"{PATH}.{shard.name}", found)
        meanings.append(meaning)
    return tensors, torch.cat(meanings)


def loaded(name: str, tensors: dict[str, torch.Tensor], **where: Any) -> Linear:
    kind = FORMATS[name]
    method = method_named(f"native_{kind.method}")
    return linear(method, kind.config, tensors, INPUTS, SHARDS, **where)


@pytest.mark.parametrize("name", WORDS)
def test_numbers_are_those_of_the_checkpoint(name: str) -> None:
    tensors, meaning = checkpoint(FORMATS[name])
    layer = loaded(name, tensors)
    assert isinstance(layer.scheme, NativeStoredScheme)
    assert {word for _, word in layer.scheme.parts(layer)} <= WORDS[name]
    assert torch.equal(layer.scheme.dequantize(layer), meaning)
    for rows in (1, 6, 200):
        x = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(layer(x), x @ meaning.t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["gptq-3", "gptq-4", "awq", "gptq-4-wide"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_their_parts(name: str, size: int) -> None:
    """Groups of 64 are cut through by four ranks: a block of 32 lies in one group all the same."""
    tensors, meaning = checkpoint(FORMATS[name])
    parts = meaning.split([shard.size for shard in SHARDS])
    for rank in range(size):
        own = loaded(name, tensors, parallel=Parallel.COLUMN, rank=Rank(rank, size))
        assert torch.equal(own.scheme.dequantize(own), torch.cat([part.chunk(size)[rank] for part in parts]))
        own = loaded(name, tensors, parallel=Parallel.ROW, rank=Rank(rank, size))
        assert torch.equal(own.scheme.dequantize(own), meaning.chunk(size, 1)[rank])


def test_packed_weights_are_small() -> None:
    tensors, _ = checkpoint(FORMATS["gptq-4"])
    layer = loaded("gptq-4", tensors)
    stored = sum(p.numel() * p.element_size() for p in layer.parameters())
    assert stored * 8 == 4.5 * 128 * INPUTS


@pytest.mark.parametrize("write", [gptq(4, 24), awq(16)], ids=["gptq", "awq"])
def test_groups_that_are_no_blocks_become_dense(write: Any) -> None:
    inputs = 96
    found, meaning = write(torch.randn(64, inputs))
    kind = FORMATS["awq" if "g_idx" not in found else "gptq-4"]
    config = {**kind.config, "group_size": 24 if "g_idx" in found else 16}
    method = method_named(f"native_{kind.method}")
    layer = linear(method, config, named(f"{PATH}.o", found), inputs, (OutputShard("o", 64),))
    assert [word for _, word in layer.scheme.parts(layer)] == ["F32"]  # type: ignore[attr-defined]
    assert torch.equal(layer.scheme.dequantize(layer), meaning)


def test_they_are_preferred_on_cpus() -> None:
    for name in ("native_gptq", "native_awq", "native_compressed_tensors", "native_auto_round"):
        method = method_named(name)
        assert method.preference(QuantizationRequest()).band is Band.GOOD and method.device_types == {"cpu"}
        assert not method.check(QuantizationRequest())
        assert [r.code for r in method.check(QuantizationRequest(online="int8"))] == ["online"]
