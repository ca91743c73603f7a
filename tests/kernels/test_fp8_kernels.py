"""8-bit floats: activations quantized row by row against torch, products of few rows with scaled weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from op_checks import draw

from jackfield.layers.functional import quantize_rows
from jackfield_quantization.fp8_kernels import quantize_tokens, rescale
from jackfield_quantization.triton_dense_launch import skinny_product
from jackfield_quantization.triton_dense_plan import SkinnyShape

PLAIN = SkinnyShape(4, 32, 1, 4, 1, matrix=False)
MATRIX = SkinnyShape(16, 32, 1, 4, 1, matrix=True)


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
@pytest.mark.parametrize(("rows", "shape"), [(1, PLAIN), (4, PLAIN), (3, MATRIX), (16, MATRIX)])
def test_weights_with_a_scale_for_each_output(rows: int, shape: SkinnyShape, splits: int, bias: bool) -> None:
    x, weight = draw(rows, 160, dtype=torch.float16, seed=1), draw(40, 160, dtype=torch.float32, seed=2)
    added = draw(40, dtype=torch.float16, seed=3) if bias else None
    narrow = quantize_rows(weight)
    values, scales = narrow.values, narrow.scales
    counters, out = torch.zeros(10, dtype=torch.int32), torch.empty(rows, 40, dtype=torch.float16)
    skinny_product(x, values, added, out, replace(shape, splits=splits), counters, scale_O=scales)
    wanted = x.double() @ (values.double() * scales.double().unsqueeze(-1)).t()
    wanted = wanted if added is None else wanted + added.double()
    assert float((out.double() - wanted).norm() / wanted.norm()) < 1e-3


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "outputs"), [(1, 16), (4, 1024), (7, 1500)])
def test_products_are_scaled_behind(rows: int, outputs: int, bias: bool) -> None:
    out = draw(rows, outputs, dtype=torch.float32)
    row_scales, scales = draw(rows, dtype=torch.float32, seed=2).abs(), draw(outputs, dtype=torch.float32, seed=3).abs()
    added = draw(outputs, dtype=torch.float32, seed=4) if bias else None
    wanted = out * row_scales.unsqueeze(-1) * scales + (0.0 if added is None else added)
    assert rescale(out, row_scales, scales, added) is out
    torch.testing.assert_close(out, wanted)
