"""Quantized checkpoints on the device: kept in 8-bit floats, and dense behind kernels for plain layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from quantized_writers import FORMATS

from jackfield.interfaces import LayerInfo, LinearScheme, OutputShard, Parallel, TensorFacts
from jackfield.layers.linear import ThenPlain
from jackfield.layers.parameters import SchemeWeight
from jackfield_quantization.compressed_tensors import CompressedTensors
from jackfield_quantization.fp8_checkpoint import Fp8Checkpoint
from jackfield_quantization.fp8_kept import KeptCompressedTensors, KeptFp8Checkpoint, KeptModelopt
from jackfield_quantization.gptq import Gptq
from jackfield_quantization.online import Int4, Int8, Mxfp8, Nf4, OnlineSpec
from jackfield_quantization.triton_dense import TritonDense
from jackfield_quantization.triton_packed import TritonGptq
from jackfield_quantization.triton_packed_launch import Packed, PackedShape, packed_product
from jackfield_quantization.triton_packed_scheme import as_words

pytestmark = pytest.mark.gpu
OUTPUTS, INPUTS = 512, 1024


def weight_of() -> torch.Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0)) * 0.05


def info_of(tensors: Mapping[str, torch.Tensor]) -> LayerInfo:
    facts = {n: TensorFacts(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}
    return LayerInfo(
        "o", INPUTS, (OutputShard("", OUTPUTS),), Parallel.REPLICATED, dtype="bfloat16", tensors={"": facts}
    )


def filled(info: LayerInfo, scheme: LinearScheme, tensors: Mapping[str, torch.Tensor]) -> SchemeWeight:
    """Return a layer on the device; scales of blocks are repeated as the loader does it."""
    layer = SchemeWeight(info, scheme, torch.device("cuda"))
    for suffix, tensor in tensors.items():
        repeat = layer.row_repeat("", suffix)
        assert layer.load("", suffix, tensor.repeat_interleave(repeat, 0) if repeat > 1 else tensor)
    assert not layer.unfilled()
    layer.finalize()
    return layer


@pytest.mark.parametrize("rows", [1, 5, 64, 300])
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("fp8-tensor", KeptFp8Checkpoint),
        ("fp8-channel", KeptFp8Checkpoint),
        ("ct-fp8-channel", KeptCompressedTensors),
        ("modelopt-fp8", KeptModelopt),
        ("fp8-block", Fp8Checkpoint),
        ("ct-w4-asymmetric", CompressedTensors),
        ("gptq-4-order", Gptq),
    ],
)
def test_products_of_stored_weights(name: str, method: Any, rows: int) -> None:
    if name.startswith("ct-"):
        pytest.importorskip("compressed_tensors", reason="its own library reads the config, and is not installed here")
    tensors, meaning = FORMATS[name].write(weight_of())
    info = info_of(tensors)
    scheme = method.scheme(info, method.parse(FORMATS[name].config))
    if scheme.becomes_dense:
        scheme = ThenPlain(scheme, TritonDense.scheme(info, None))
    layer = filled(info, scheme, tensors)
    x = torch.randn(rows, INPUTS, device="cuda", dtype=torch.bfloat16)
    expected = x.double() @ meaning.to("cuda").double().t()
    # Rows in 8-bit floats: three bits of mantissa on each of the inputs, added up.
    close = 0.04 if not isinstance(scheme, ThenPlain) and rows > 1 else 0.01
    error = (layer.scheme.apply(layer, x, None).double() - expected).norm() / expected.norm()
    assert float(error) < close


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("method", [Int8, Int4, Mxfp8, Nf4])
def test_products_of_converted_weights(method: Any, rows: int) -> None:
    tensors = {"weight": weight_of().to(torch.bfloat16)}
    layer = filled(info_of(tensors), method.scheme(info_of(tensors), OnlineSpec()), tensors)
    x = torch.randn(rows, INPUTS, device="cuda", dtype=torch.bfloat16)
    weight = layer.scheme.dequantize(layer).double()
    error = (weight - weight_of().to("cuda").double()).norm() / weight.norm()
    assert float(error) < 0.12
    expected = x.double() @ weight.t()
    assert float((layer.scheme.apply(layer, x, None).double() - expected).norm() / expected.norm()) < 0.01


@pytest.mark.parametrize("rows", [1, 9, 20, 100, 300])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_of_packed_weights(dtype: str, rows: int) -> None:
    tensors, meaning = FORMATS["gptq-4-wide"].write(weight_of())
    info = replace(info_of(tensors), dtype=dtype)
    layer = filled(info, TritonGptq.scheme(info, TritonGptq.parse(FORMATS["gptq-4-wide"].config)), tensors)
    assert layer.get_parameter("weight").dtype == torch.int16
    x = torch.randn(rows, INPUTS, device="cuda", dtype=getattr(torch, dtype))
    expected = x.double() @ meaning.to("cuda").double().t()
    for _ in range(2):
        error = (layer.scheme.apply(layer, x, None).double() - expected).norm() / expected.norm()
        assert float(error) < 0.005


LAUNCHES = {
    "eight rows": PackedShape(64, 8, 2, 4, 2, few=True),
    "few rows": PackedShape(64, 16, 4, 4, 3, few=True),
    "some rows": PackedShape(64, 32, 4, 4, few=True),
    "many rows": PackedShape(64, 64, 4, 3),
    "many rows, parts": PackedShape(64, 64, 4, 3, 2),
    "copy engine": PackedShape(64, 256, 4, 3, tma=True),
    "copy engine, parts": PackedShape(64, 64, 4, 5, 3, tma=True),
    "copy engine, tall": PackedShape(128, 64, 4, 3, tma=True),
    "slices": PackedShape(16, 8, 8, 1, few=True, slices=8),
    "slices, two a warp": PackedShape(16, 8, 4, 1, few=True, slices=8),
    "slices, more than blocks": PackedShape(16, 16, 8, 1, few=True, slices=16),
}


@pytest.mark.parametrize(
    ("group", "name"),
    # Blocks of groups of 16 are narrower than slices are.
    [(group, name) for group in (256, 128, 64, 32, 16) for name in LAUNCHES if group > 16 or not LAUNCHES[name].slices],
)
def test_every_launch_of_packed_weights(group: int, name: str) -> None:
    shape, outputs, inputs = LAUNCHES[name], 392, 1024
    rows = shape.block_t - 1 if shape.few else shape.block_t + 3
    numbers = torch.randint(0, 16, (outputs, inputs), device="cuda")
    zeros = torch.randint(0, 17, (outputs, inputs // group), device="cuda").repeat_interleave(group, 1)
    scales = torch.rand(outputs, inputs // group, device="cuda").bfloat16().float()
    made = as_words(numbers - zeros, scales, group)
    assert made is not None
    counters = torch.zeros(64, dtype=torch.int32, device="cuda")
    x, bias = (torch.randn(n, device="cuda", dtype=torch.bfloat16) for n in ((rows, inputs), (outputs,)))
    expected = x.double() @ ((numbers - zeros) * scales.repeat_interleave(group, 1)).double().t() + bias.double()
    for pdl in (False, True):
        out = torch.full((rows, outputs), float("nan"), device="cuda", dtype=torch.bfloat16)
        packed_product(x, Packed(*made, group), bias, out, shape, counters, pdl)
        assert float((out.double() - expected).norm() / expected.norm()) < 0.005
        assert not counters.any()
