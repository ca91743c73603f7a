# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Rows of activations to float8_e4m3fn. Legend: T rows, I inputs.

PDL: the launch is a programmatic dependent one (``jackfield_triton.launch``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from jackfield.interfaces import QuantizedActivation
from jackfield_triton.launch import launch_options, pdl_of

LARGEST = 448.0
SMALLEST_SCALE = 1e-12
RESCALE_ROWS, RESCALE_BLOCK = 4, 1024
LONGEST = 32768
"""Most inputs of a row that one program keeps in registers."""


@triton.jit
def quantize_kernel(
    x, out, scales, inputs, x_row, BLOCK: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (rows,). BLOCK covers a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < inputs
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0) / LARGEST, SMALLEST)
    value = tl.minimum(tl.maximum(value / scale, -LARGEST), LARGEST)
    tl.store(out + row * inputs + column, value.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def rescale_kernel(
    out, row_scales, scales, bias, rows, outputs, ROWS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of ``out`` by their scales and those of the outputs, in place; grid: (rows, outputs)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (row < rows) & (column < outputs)
    factor = tl.load(scales + column, mask=column < outputs, other=0.0)
    if BIAS:
        added = tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    place = out + row.to(tl.int64) * outputs + column
    value = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    value = value * tl.load(row_scales + row, mask=row < rows, other=0.0) * factor
    if BIAS:
        value += added
    tl.store(place, value.to(out.dtype.element_ty), mask=mask)


def rescale(
    out_TO: torch.Tensor, row_scales_T: torch.Tensor, scales_O: torch.Tensor, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """Multiply ``out`` [T, O], contiguous, by both scales (float32) in place, add the bias, and return it."""
    rows, outputs = out_TO.shape
    pdl = out_TO.is_cuda and pdl_of(torch.cuda.get_device_capability(out_TO.device), True)
    rescale_kernel[(-(-rows // RESCALE_ROWS), -(-outputs // RESCALE_BLOCK))](
        out_TO,
        row_scales_T,
        scales_O,
        scales_O if bias_O is None else bias_O,
        rows,
        outputs,
        ROWS=RESCALE_ROWS,
        BLOCK=RESCALE_BLOCK,
        BIAS=bias_O is not None,
        num_warps=4,
        **launch_options(pdl),
    )
    return out_TO


def quantize_tokens(x_TI: torch.Tensor) -> QuantizedActivation:
    """Return each row in float8_e4m3fn with its scale: the largest number of a row becomes the type's largest.

    Args:
        x_TI: contiguous inside a row, of at most 32768 inputs.
    """
    rows, inputs = x_TI.shape
    assert x_TI.stride(1) == 1 and inputs <= LONGEST
    out = torch.empty((rows, inputs), dtype=torch.float8_e4m3fn, device=x_TI.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x_TI.device)
    pdl = x_TI.is_cuda and pdl_of(torch.cuda.get_device_capability(x_TI.device), True)
    block = triton.next_power_of_2(inputs)
    quantize_kernel[(rows,)](
        x_TI,
        out,
        scales,
        inputs,
        x_TI.stride(0),
        BLOCK=block,
        LARGEST=LARGEST,
        SMALLEST=SMALLEST_SCALE,
        num_warps=min(16, max(1, block // 512)),
        **launch_options(pdl),
    )
    return QuantizedActivation(out, scales)
