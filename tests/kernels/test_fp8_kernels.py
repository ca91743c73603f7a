"""8-bit floats: activations quantized row by row against torch, products of few rows with scaled weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from op_checks import draw

from jackfield.interfaces import ActivationSpec, LayerInfo, OutputShard, Parallel, ParameterHolder, PendingNorm
from jackfield.layers.functional import quantize_rows, settled, silu_and_mul
from jackfield_quantization.fp8_kernels import quantize_tokens, rescale
from jackfield_quantization.fp8_scheme import Fp8Scheme
from jackfield_quantization.triton_dense_launch import skinny_product
from jackfield_quantization.triton_dense_plan import AROUND, SkinnyShape

PLAIN = SkinnyShape(4, 32, 1, 4, 1, matrix=False)
MATRIX = SkinnyShape(16, 32, 1, 4, 1, matrix=True)
SLICED = SkinnyShape(16, 64, 1, 4, 1, matrix=True, slices=4)


def representable(rows: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values [rows, inputs] of the type, the largest among them in each row, and scales that are powers of 2.

    The interpreter loses a carry when it rounds to this type, so that rounding itself is tested on a device.
    """
    values = draw(rows, inputs, dtype=torch.float32, seed=4).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    values.view(torch.uint8)[:, inputs // 2] = 0x7E  # 448
    return values, 2.0 ** -torch.arange(1, rows + 1).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "inputs"), [(1, 16), (5, 100), (3, 4096), (2, 12288)])
def test_rows_get_the_scale_that_makes_their_largest_number_the_types_largest(
    rows: int, inputs: int, dtype: torch.dtype
) -> None:
    values, scales = representable(rows, inputs)
    x = (values.float() * scales.unsqueeze(-1)).to(dtype)
    found = quantize_tokens(x)
    assert torch.equal(found.scales, scales)
    assert torch.equal(found.values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(quantize_rows(x).scales, scales)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def test_rows_of_zeros_and_strided_rows() -> None:
    values, scales = representable(4, 64)
    wide = torch.full((4, 96), 1e6)
    wide[:, 16:80] = values.float() * scales.unsqueeze(-1)
    wide[2, 16:80] = 0.0
    found = quantize_tokens(wide[:, 16:80])
    back = found.values.float() * found.scales.unsqueeze(-1)
    assert torch.equal(back, wide[:, 16:80])


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "shape"), [(1, PLAIN), (4, PLAIN), (3, MATRIX), (16, MATRIX), (8, SLICED)])
def test_weights_with_a_scale_for_each_output(rows: int, shape: SkinnyShape, splits: int, bias: bool) -> None:
    x, weight = draw(rows, 160, dtype=torch.float16, seed=1), draw(40, 160, dtype=torch.float32, seed=2)
    added = draw(40, dtype=torch.float16, seed=3) if bias else None
    narrow = quantize_rows(weight)
    values, scales = narrow.values, narrow.scales
    counters, out = torch.zeros(10, dtype=torch.int32), torch.empty(rows, 40, dtype=torch.float16)
    skinny_product(x, values, added, out, replace(shape, splits=splits), counters, scale_O=scales)
    wanted = x.double() @ (values.double() * scales.double().unsqueeze(-1)).t()
    wanted = wanted if added is None else wanted + added.double()
    assert relative_error(out, wanted) < 1e-3


class Layer:
    """The least a layer can be."""

    info = LayerInfo(
        "up", 512, (OutputShard("gate", 264), OutputShard("up", 264)), Parallel.REPLICATED, dtype="float16"
    )

    def __init__(self) -> None:
        self.parameters = {"weight": draw(528, 512, dtype=torch.float32, seed=2) / 8}

    def get_parameter(self, target: str) -> torch.Tensor:
        return self.parameters[target]

    def replace_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = dict(parameters)


class OnFewCores(Fp8Scheme):
    """The scheme as it is on a device."""

    def hold(self, layer: ParameterHolder, weight: torch.Tensor, scale_O: torch.Tensor) -> None:
        super().hold(layer, weight, scale_O)
        self._cores, self._counters = 4, torch.zeros(512, dtype=torch.int32)


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 9])
def test_few_rows_are_not_quantized_and_what_is_beside_their_product_is_folded(rows: int) -> None:
    layer, scheme = Layer(), OnFewCores()
    scheme.finalize(layer)
    few = rows <= 8
    assert scheme.activation_spec(layer.info, rows) == (None if few else ActivationSpec("float8_e4m3fn", "token"))
    assert scheme.folded_ops(layer.info, rows) == (AROUND if few else frozenset())
    x, other = (draw(rows, 512, dtype=torch.float16, seed=seed) for seed in (1, 3))
    weight = scheme.dequantize_as(layer, torch.float64)
    error = relative_error(scheme.apply(layer, x, None), x.double() @ weight.t())
    # How well rows are quantized is tested on a device.
    assert error < 1e-3 if few else error > 1e-2
    if few:
        given = PendingNorm(x, other, torch.empty_like(x), 1 + other[0] / 8, 1e-5)
        wanted = settled(replace(given, x=x.double(), residual=other.double(), weight=given.weight.double()))
        found = scheme.apply_folded(layer, given, None, "silu_and_mul")
        assert relative_error(found, silu_and_mul(wanted @ weight.t())) < 2e-3
        assert given.total is not None and torch.equal(given.total, x + other)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "outputs"), [(1, 16), (4, 1024), (7, 1500)])
def test_products_are_scaled_behind(rows: int, outputs: int, bias: bool) -> None:
    out = draw(rows, outputs, dtype=torch.float32)
    row_scales, scales = draw(rows, dtype=torch.float32, seed=2).abs(), draw(outputs, dtype=torch.float32, seed=3).abs()
    added = draw(outputs, dtype=torch.float32, seed=4) if bias else None
    wanted = out * row_scales.unsqueeze(-1) * scales + (0.0 if added is None else added)
    assert rescale(out, row_scales, scales, added) is out
    torch.testing.assert_close(out, wanted)
