"""Orders of numbers that kernels chose, as the libraries themselves wrote them: AutoAWQ 0.2.9 and compressed-tensors
0.10.2, which were the last with each of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_writers import marlin
from safetensors.torch import load_file
from stored_world import PATH, Rank, linear, method_named, named

from jackfield.errors import CheckpointError
from jackfield.interfaces import OutputShard, Parallel
from jackfield_quantization.awq_layouts import marlin_order
from jackfield_quantization.compressed_storage import with_zeros

GOLDEN = Path(__file__).parent / "golden"
OUTPUTS, INPUTS = 64, 128
SHARDS = (OutputShard("o", OUTPUTS),)


def golden(file: str, kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return tensors of a kind by suffix, and what they mean."""
    start = f"{kind}."
    found = {n.removeprefix(start): t for n, t in load_file(GOLDEN / file).items() if n.startswith(start)}
    return found, found.pop("meaning")


def dequantized(method: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    layer = linear(method_named(method), config, named(f"{PATH}.o", tensors), INPUTS, SHARDS)
    return layer.scheme.dequantize(layer)


@pytest.mark.parametrize("kind", ["gemv", "gemv_fast", "marlin", "marlin_whole"])
def test_versions_of_awq(kind: str) -> None:
    tensors, meaning = golden("awq_layouts.safetensors", kind)
    group = INPUTS if "whole" in kind else 32
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": kind.removesuffix("_whole")}
    torch.testing.assert_close(dequantized("awq", config, tensors), meaning, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["marlin", "marlin_whole"])
@pytest.mark.parametrize("names", [("qweight", "scales"), ("B", "s")])
@pytest.mark.parametrize("word", [{"checkpoint_format": "marlin"}, {"is_marlin_format": True}])
def test_marlin_files_of_gptq(kind: str, names: tuple[str, str], word: dict[str, Any]) -> None:
    """By both names that its tensors had; a workspace of the kernel is no part of the weight."""
    tensors, meaning = golden("awq_layouts.safetensors", kind)
    found = dict(zip(names, (tensors["qweight"], tensors["scales"]), strict=True))
    config = {"quant_method": "gptq", "bits": 4, "group_size": -1 if "whole" in kind else 32, **word}
    found["workspace"] = torch.zeros(16, dtype=torch.int32)
    torch.testing.assert_close(dequantized("gptq", config, found), meaning, rtol=1e-6, atol=1e-7)


def test_marlin_moves_every_number_once() -> None:
    assert sorted(marlin_order()) == list(range(1024))


def test_marlin_files_of_fused_matrices_are_refused() -> None:
    """Tiles of four times 16 outputs have no rows that could be told apart."""
    tensors, _ = golden("awq_layouts.safetensors", "marlin")
    shards = (OutputShard("q", 64), OutputShard("k", 64))
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "marlin"}
    with pytest.raises(CheckpointError, match="rows cannot be told apart"):
        linear(method_named("awq"), config, named(f"{PATH}.qk", tensors), INPUTS, shards, fused="qk")


def test_marlin_files_are_whole_tiles() -> None:
    tensors, _ = golden("awq_layouts.safetensors", "marlin")
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "marlin"}
    with pytest.raises(CheckpointError, match=r"\[96, 128\] is not made of Marlin's tiles"):
        linear(method_named("awq"), config, named(f"{PATH}.o", tensors), INPUTS, (OutputShard("o", 96),))


@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("parallel", [Parallel.COLUMN, Parallel.ROW])
def test_ranks_have_their_parts_of_marlin_files(group: int, parallel: Parallel) -> None:
    """Written by threads of a warp, as its paper draws them."""
    weight = torch.randn(128, INPUTS, generator=torch.Generator().manual_seed(4))
    tensors, meaning = marlin(group)(weight)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "marlin"}
    for rank in range(4):
        place = {"parallel": parallel, "rank": Rank(rank, 4)}
        layer = linear(
            method_named("awq"), config, named(f"{PATH}.o", tensors), INPUTS, (OutputShard("o", 128),), **place
        )
        part = meaning.chunk(4, 0 if parallel is Parallel.COLUMN else 1)[rank]
        torch.testing.assert_close(layer.scheme.dequantize(layer), part, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int8"])
def test_two_of_four(kind: str) -> None:
    tensors, meaning = golden("sparse_24.safetensors", kind)
    found = with_zeros(tensors["compressed"], tensors["bitmask"])
    assert found.dtype == meaning.dtype and torch.equal(found.view(torch.uint8), meaning.view(torch.uint8))
    assert found.shape == tuple(tensors["shape"].flatten())
