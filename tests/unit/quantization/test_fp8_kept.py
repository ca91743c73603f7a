"""Checkpoints in 8-bit floats that stay so."""

from __future__ import annotations

import pytest
import torch
from quantized_writers import FORMATS
from stored_world import PATH, Rank, linear, method_named, named

from jackfield.interfaces import Band, DeviceFacts, OutputShard, Parallel, QuantizationRequest
from jackfield.layers.functional import quantize_rows
from jackfield_quantization.fp8_kept_scheme import KeptFp8Scheme

INPUTS = 128
SHARDS = (OutputShard("q_proj", 64), OutputShard("k_proj", 32), OutputShard("v_proj", 32))
KEPT = {
    "fp8-tensor": "fp8_checkpoint_kept",
    "fp8-static": "fp8_checkpoint_kept",
    "fbgemm": "fp8_checkpoint_kept",
    "ct-fp8-tensor": "compressed_tensors_kept",
    "ct-fp8-channel": "compressed_tensors_kept",
    "modelopt-fp8": "modelopt_kept",
    "modelopt-fp8-channel": "modelopt_kept",
    "quark-fp8": "quark_kept",
    "quark-fp8-channel": "quark_kept",
}
DENSE = {
    "fp8-block": "fp8_checkpoint_kept",
    "modelopt-fp8-block": "modelopt_kept",
    "modelopt-mxfp8": "modelopt_kept",
    "modelopt-nvfp4-awq": "modelopt_kept",
    "ct-w4-asymmetric": "compressed_tensors_kept",
    "ct-int8-asymmetric": "compressed_tensors_kept",
    "quark-int8": "quark_kept",
}


def checkpoint(name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    meanings = []
    for seed, shard in enumerate(SHARDS):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(shard.size, INPUTS, generator=generator) * (seed + 1)
        found, meaning = FORMATS[name].write(weight)
        tensors |= named(f"{PATH}.{shard.name}", found)
        meanings.append(meaning)
    return tensors, torch.cat(meanings)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", KEPT)
def test_numbers_stay_as_they_are_stored(name: str, size: int) -> None:
    tensors, meaning = checkpoint(name)
    parts = meaning.split([shard.size for shard in SHARDS])
    for rank in range(size):
        where = {"parallel": Parallel.COLUMN, "rank": Rank(rank, size)}
        layer = linear(method_named(KEPT[name]), FORMATS[name].config, tensors, INPUTS, SHARDS, **where)
        assert isinstance(layer.scheme, KeptFp8Scheme)
        weight = layer.get_parameter("weight")
        assert weight.dtype == torch.float8_e4m3fn and {n for n, _ in layer.named_parameters()} == {
            "weight",
            "weight_scale",
        }
        expected = torch.cat([part.chunk(size)[rank] for part in parts])
        torch.testing.assert_close(layer.scheme.dequantize(layer), expected, rtol=1e-6, atol=1e-7)
        x = torch.randn(5, INPUTS)
        torch.testing.assert_close(layer(x), x @ expected.t(), rtol=1e-5, atol=1e-4)
        rows = quantize_rows(x)
        wide = rows.values.float() * rows.scales.unsqueeze(1)
        torch.testing.assert_close(layer(rows), wide @ expected.t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", DENSE)
def test_all_else_becomes_dense(name: str) -> None:
    tensors, meaning = checkpoint(name)
    layer = linear(method_named(DENSE[name]), FORMATS[name].config, tensors, INPUTS, SHARDS)
    assert not isinstance(layer.scheme, KeptFp8Scheme)
    torch.testing.assert_close(layer.scheme.dequantize(layer), meaning, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(set(KEPT.values())))
def test_where_it_is_chosen(name: str) -> None:
    method, narrow = method_named(name), frozenset({"float8_e4m3fn", "bfloat16"})
    new, old = DeviceFacts("cuda", capability=(9, 0)), DeviceFacts("cuda", capability=(8, 0))
    request = QuantizationRequest(device=new, storage_dtypes=narrow)
    assert not method.check(request) and method.preference(request).band is Band.GOOD
    assert method.device_types == {"cuda"}
    assert [r.code for r in method.check(QuantizationRequest(device=old, storage_dtypes=narrow))] == ["capability"]
    packed = QuantizationRequest(device=new, storage_dtypes=frozenset({"int32", "float16"}))
    assert [r.code for r in method.check(packed)] == ["storage_dtype"]
