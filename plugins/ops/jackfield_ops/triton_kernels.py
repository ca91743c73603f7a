# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of the layer ops. Plain pointers and basic features only, so that old and new compilers take them.

Every kernel loads into float32 and rounds to the storage type where the torch reference does. Last dimensions are
contiguous; row strides are free. Sizes that are powers of two above the real width are masked. PDL: the launch is a
programmatic dependent one (``jackfield_triton.launch``), so all but weights is touched after the wait.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jackfield_triton.activation import activated


@triton.jit
def _row_offsets(row, inner, stride_outer, stride_inner):
    """Return element offsets of rows of a tensor whose leading dimensions are (outer, inner)."""
    return (row // inner).to(tl.int64) * stride_outer + (row % inner).to(tl.int64) * stride_inner


@triton.jit
def _normalized(x, weight, eps, WIDTH: tl.constexpr, TYPE: tl.constexpr):
    """Return x / rms(x), rounded, times the weight, both in float32; rows are the first dimension."""
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + eps)
    return (x * scale[:, None]).to(TYPE).to(tl.float32) * weight[None, :]


@triton.jit
def _store_rows(values, out, scales, place, row, rows, mask, TYPE: tl.constexpr, QUANT: tl.constexpr):
    """Round ``values`` [rows, columns], zero outside ``mask``, to TYPE and store them; with QUANT as 8-bit floats, and
    the scale of each row beside them.
    """
    rounded = values.to(TYPE)
    if QUANT:
        wide = rounded.to(tl.float32)
        scale = tl.maximum(tl.max(tl.where(mask, tl.abs(wide), 0.0), 1) / 448.0, 1e-12)
        narrow = tl.minimum(tl.maximum(wide / scale[:, None], -448.0), 448.0)
        tl.store(out + place, narrow.to(out.dtype.element_ty), mask=mask)
        tl.store(scales + row, scale, mask=row < rows)
    else:
        tl.store(out + place, rounded, mask=mask)


@triton.jit
def rms_norm_kernel(
    x, weight, out, scales, rows, inner, stride_outer, stride_inner, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, QUANT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm of ROWS rows; ``out`` is contiguous."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    source = x + _row_offsets(row, inner, stride_outer, stride_inner)[:, None] + column[None, :]
    values = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    normal = _normalized(values, factor, eps, WIDTH, x.dtype.element_ty)
    place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    _store_rows(normal, out, scales, place, row, rows, mask, x.dtype.element_ty, QUANT)


@triton.jit
def fused_add_rms_norm_kernel(
    x, residual, weight, out, scales, total, rows, stride_x, stride_residual, eps, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, QUANT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum and norm of ROWS rows; ``out`` and ``total`` are contiguous."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    wide_row = row.to(tl.int64)[:, None]
    left = tl.load(x + wide_row * stride_x + column[None, :], mask=mask, other=0.0).to(tl.float32)
    right = tl.load(residual + wide_row * stride_residual + column[None, :], mask=mask, other=0.0).to(tl.float32)
    added = (left + right).to(total.dtype.element_ty)
    place = wide_row * WIDTH + column[None, :]
    tl.store(total + place, added, mask=mask)
    normal = _normalized(added.to(tl.float32), factor, eps, WIDTH, total.dtype.element_ty)
    _store_rows(normal, out, scales, place, row, rows, mask, total.dtype.element_ty, QUANT)


@triton.jit
def gated_kernel(x, out, width, stride, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Activation of the first half of a row times the second half; ``out`` is contiguous."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    source = x + row * stride + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    active = activated(gate, KIND).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (active * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def gated_quant_kernel(
    x, out, scales, width, stride, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The same for a whole row, as 8-bit floats with a scale; BLOCK covers the row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) + tl.arange(0, 1)
    wide_row = row.to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = column < width
    source = x + wide_row * stride + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    active = activated(gate, KIND).to(x.dtype.element_ty).to(tl.float32)
    place = wide_row * width + column
    _store_rows(active * up, out, scales, place, row, row + 1, mask, x.dtype.element_ty, True)


@triton.jit
def rotary_kernel(
    x, cos_sin, heads, stride_token, stride_head, stride_angle, HALF: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of one token in place. A thread holds both members of its pairs, so nothing races."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK)
    mask = (head < heads)[:, None] & (pair < HALF)[None, :]
    angles = cos_sin + token * stride_angle + pair
    cos = tl.load(angles, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angles + HALF, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    place = x + token * stride_token + head.to(tl.int64)[:, None] * stride_head + pair[None, :]
    low = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (low * cos - high * sin).to(x.dtype.element_ty), mask=mask)
    tl.store(place + HALF, (high * cos + low * sin).to(x.dtype.element_ty), mask=mask)
