"""Weights converted to 8-bit floats at load: bytes, errors, sharding, selection."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F

from jackfield.interfaces import (
    Band,
    DeviceFacts,
    LayerInfo,
    OutputShard,
    Parallel,
    QuantizationRequest,
    RankInfo,
)
from jackfield.layers.functional import quantize_rows
from jackfield_quantization.fp8 import Fp8
from jackfield_quantization.fp8_scheme import SCALE, Fp8Scheme

INFO = LayerInfo("qkv", 64, (OutputShard("q", 32), OutputShard("k", 16)), Parallel.COLUMN, dtype="float32")


class Holder:
    """The least a layer can be."""

    def __init__(self, weight: torch.Tensor, info: LayerInfo = INFO) -> None:
        self.info = info
        self.parameters = {"weight": weight}

    def get_parameter(self, target: str) -> torch.Tensor:
        return self.parameters[target]

    def replace_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = dict(parameters)


def loaded(weight: torch.Tensor, info: LayerInfo = INFO) -> tuple[Holder, Fp8Scheme]:
    layer, scheme = Holder(weight, info), Fp8Scheme()
    scheme.finalize(layer)
    return layer, scheme


def weight_of(rows: int = 48, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 64, generator=generator) * torch.logspace(-3, 2, rows).unsqueeze(-1)


def test_every_output_has_a_scale_and_a_relative_error_of_the_type() -> None:
    weight = weight_of()
    layer, scheme = loaded(weight)
    values = layer.get_parameter("weight")
    assert values.dtype == torch.float8_e4m3fn and values.element_size() == 1
    assert torch.equal(values.float().abs().amax(-1), torch.full((48,), 448.0))
    back = scheme.dequantize(layer)
    # Three bits of mantissa: half a step is 1/16; far below the largest number of a row, steps are even.
    bound = weight.abs() / 16 + weight.abs().amax(-1, keepdim=True) / 448 * 2.0**-10
    assert bool(((back - weight).abs() <= bound * 1.0001).all())


def test_the_product_is_that_of_the_stored_weight() -> None:
    layer, scheme = loaded(weight_of())
    x, bias = torch.randn(5, 64), torch.randn(48)
    assert torch.equal(scheme.apply(layer, x, bias), F.linear(x, scheme.dequantize(layer), bias))
    out = torch.empty(5, 48)
    assert scheme.apply(layer, x, None, out) is out
    assert torch.equal(out, F.linear(x, scheme.dequantize(layer)))


def test_quantized_rows_are_taken() -> None:
    layer, scheme = loaded(weight_of())
    assert scheme.activation_spec(INFO, 64) is None, "where nothing multiplies 8-bit floats, rows stay as they are"
    rows = quantize_rows(torch.randn(3, 64) * 7)
    found = scheme.apply(layer, rows, None)
    assert torch.equal(found, F.linear(rows.values.float() * rows.scales.unsqueeze(-1), scheme.dequantize(layer)))


@pytest.mark.parametrize("size", [2, 4])
def test_sharding_then_converting_is_converting_then_sharding_for_outputs(size: int) -> None:
    weight = weight_of(64)
    whole, scheme = loaded(weight)
    for rank in range(size):
        part = 64 // size
        cut, own = loaded(weight[rank * part : (rank + 1) * part])
        assert torch.equal(own.dequantize(cut), scheme.dequantize(whole)[rank * part : (rank + 1) * part])
        assert torch.equal(cut.get_parameter(SCALE), whole.get_parameter(SCALE)[rank * part : (rank + 1) * part])


def test_rows_of_zeros_stay_zeros() -> None:
    layer, scheme = loaded(torch.zeros(48, 64))
    assert not scheme.dequantize(layer).any()


@pytest.mark.parametrize(
    ("info", "taken"),
    [
        (INFO, True),
        (LayerInfo("e", 64, (OutputShard("", 512),), Parallel.COLUMN, role="embedding"), False),
        (LayerInfo("h", 64, (OutputShard("", 512),), Parallel.COLUMN, role="head"), False),
        (LayerInfo("x", 64, (OutputShard("", 512),), Parallel.COLUMN, role="experts", num_experts=4), True),
        (LayerInfo("odd", 60, (OutputShard("", 512),), Parallel.COLUMN), False),
        (LayerInfo("o", 64, (OutputShard("", 32),), Parallel.ROW, rank=RankInfo(0, 8)), False),
    ],
)
def test_which_layers_are_converted(info: LayerInfo, taken: bool) -> None:
    assert (Fp8.scheme(info, None) is not None) is taken


def test_old_devices_are_rejected_and_others_told_the_price() -> None:
    old, new = DeviceFacts("cuda", capability=(8, 6)), DeviceFacts("cuda", capability=(9, 0))
    (reason,) = Fp8.check(QuantizationRequest(device=old))
    assert (reason.code, reason.detail) == ("capability", "8.6 is below 8.9")
    assert not Fp8.check(QuantizationRequest(device=new))
    assert Fp8.preference(QuantizationRequest(device=new)).band is Band.GOOD
    assert Fp8.preference(QuantizationRequest(device=DeviceFacts("cpu"))).band is Band.FALLBACK
