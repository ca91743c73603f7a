"""Reports about other engines and tools, as tests of this one: matrices of GPTQ, AWQ, FP8 and compressed-tensors.

A test is named after its report in a public tracker, which the docstring cites; each shows what is right.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantized_writers import FORMATS, compressed, fp8, gptq, groups_of
from stored_world import PATH, Rank, linear, method_named, named, with_config

from jackfield.errors import CheckpointError
from jackfield.interfaces import OutputShard, Parallel

INPUTS = 256
FUSED = (OutputShard("q_proj", 64), OutputShard("k_proj", 32), OutputShard("v_proj", 32))
WHOLE = (OutputShard("o", 64),)
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 64}
REORDERED: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}


def weight_of(outputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, INPUTS, generator=torch.Generator().manual_seed(seed))


def one(name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor], **layer: Any) -> Any:
    return linear(method_named(name), config, named(f"{PATH}.o", tensors), INPUTS, WHOLE, **layer)


@pytest.mark.parametrize("parallel", [Parallel.ROW, Parallel.COLUMN])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_r214_shuffled_groups_of_inputs_cut_among_ranks(parallel: Parallel, size: int) -> None:
    """AutoGPTQ/AutoGPTQ#201, vllm-project/vllm#916: desc_act with a g_idx out of order gave gibberish."""
    tensors, meaning = gptq(4, 128, reordered=True)(weight_of(64))
    order = tensors["g_idx"]
    assert bool((order[1:] < order[:-1]).any()), "groups are in order, which tests nothing"
    parts = []
    for rank in range(size):
        layer = one("gptq", REORDERED, tensors, parallel=parallel, rank=Rank(rank, size))
        parts.append(layer.scheme.dequantize(layer))
    torch.testing.assert_close(torch.cat(parts, 1 if parallel is Parallel.ROW else 0), meaning)


def test_r216_zero_points_that_are_not_packed_are_named() -> None:
    """vllm-project/vllm#17862: a qzeros of the scales' shape failed deep inside."""
    tensors, _ = gptq(4, 128)(weight_of(64))
    tensors["qzeros"] = torch.full(tuple(tensors["scales"].shape), 7, dtype=torch.int32)
    with pytest.raises(CheckpointError, match=r"layer .*zero points \(qzeros\) are not packed") as caught:
        one("gptq", with_config(REORDERED, desc_act=False), tensors)
    assert caught.value.field == "quantization_config" and caught.value.remedy == "pack the model again"


def test_r218_a_zero_point_of_zero_is_kept() -> None:
    """ModelCloud/GPTQModel#2350: 0 less 1 was packed as 15 and read as 16."""
    tensors, meaning = gptq(4, 128, symmetric=False)(weight_of(64).abs())
    assert bool((tensors["qzeros"] == -1).all()), "all nibbles are 15"
    layer = one("gptq", with_config(REORDERED, desc_act=False), tensors)
    found = layer.scheme.dequantize(layer)
    assert bool(torch.isfinite(found).all()) and float(found.min()) >= 0.0
    torch.testing.assert_close(found, meaning)


@pytest.mark.parametrize("stored", [True, False])
def test_r220_zero_points_against_the_scheme_are_listed_with_it(stored: bool) -> None:
    """vllm-project/llm-compressor#2255: zero points that the scheme does not have, or that the file lacks."""
    tensors, _ = compressed({**W4, "symmetric": not stored}, "pack-quantized")(weight_of(64))
    assert ("weight_zero_point" in tensors) is stored
    with pytest.raises(CheckpointError, match="weight_zero_point") as caught:
        one("compressed_tensors", groups_of({**W4, "symmetric": stored}, "pack-quantized"), tensors)
    text = str(caught.value)
    assert f"{PATH}.o" in text
    assert f"int of 4 bits, strategy group of 64, {'symmetric' if stored else 'asymmetric'}" in text


def test_r222_one_scale_of_a_fused_tensor_is_every_parts() -> None:
    """vllm-project/vllm#39764: slots of the other parts were left as they were allocated."""
    tensors, meaning = fp8("tensor")(weight_of(128))
    kind, names = FORMATS["fp8-tensor"], named(f"{PATH}.qkv_proj", tensors)
    layer = linear(method_named("fp8_checkpoint"), kind.config, names, INPUTS, FUSED, fused="qkv_proj")
    torch.testing.assert_close(layer.scheme.dequantize(layer), meaning)
    del names[f"{PATH}.qkv_proj.weight_scale"]
    with pytest.raises(CheckpointError, match=r"lacks weights .*weight_scale"):
        linear(method_named("fp8_checkpoint"), kind.config, names, INPUTS, FUSED, fused="qkv_proj")


def test_r228_some_parts_of_a_fused_layer_ignored() -> None:
    """vllm-project/vllm#11354: lists of what is ignored were not looked at for fused layers, or parts taken for what
    they are not.
    """
    write = compressed(W4, "pack-quantized")
    packed: dict[str, torch.Tensor] = {}
    meanings = []
    for seed, shard in enumerate(FUSED):
        found, meaning = write(weight_of(shard.size, seed))
        packed |= named(f"{PATH}.{shard.name}", found)
        meanings.append(meaning)
    plain = {f"{PATH}.{shard.name}.weight": weight_of(shard.size, 9) for shard in FUSED}
    method, some = method_named("compressed_tensors"), groups_of(W4, "pack-quantized", ignore=["re:.*k_proj"])
    mixed = {name: tensor for name, tensor in packed.items() if "k_proj" not in name}
    k = {f"{PATH}.k_proj.weight": plain[f"{PATH}.k_proj.weight"]}
    layer = linear(method, some, {**mixed, **k}, INPUTS, FUSED)
    wanted = torch.cat([meanings[0], k[f"{PATH}.k_proj.weight"], meanings[2]])
    torch.testing.assert_close(layer.scheme.dequantize(layer), wanted)
    for name in ("re:.*[qkv]_proj", "re:.*qkv_proj", f"{PATH}.qkv_proj"):
        layer = linear(method, groups_of(W4, "pack-quantized", ignore=[name]), plain, INPUTS, FUSED)
        assert torch.equal(layer.scheme.dequantize(layer), torch.cat(list(plain.values())))
    with pytest.raises(CheckpointError, match=r"k_proj"):
        linear(method, some, packed, INPUTS, FUSED)


@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 4, "type": "int", "strategy": "tensor", "symmetric": False},
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 64},
    ],
)
def test_r230_a_scheme_that_nothing_reads_is_described(weights: dict[str, Any]) -> None:
    """vllm-project/vllm#30969: 'no compatible scheme', and nothing else."""
    tensors, _ = compressed(W4, "pack-quantized")(weight_of(64))
    with pytest.raises(CheckpointError) as caught:
        one("compressed_tensors", groups_of(weights, "pack-quantized"), tensors)
    text = str(caught.value)
    symmetry = "symmetric" if weights.get("symmetric", True) else "asymmetric"
    for part in (
        f"{PATH}.o",
        "of 4 bits",
        f"strategy {weights['strategy']}",
        f", {symmetry}",
        "what is read: int of 2",
    ):
        assert part in text
