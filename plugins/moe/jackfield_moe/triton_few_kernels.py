# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Products of few rows with the matrices of their experts: what counts is how weights are read, so rows are not sorted,
and sums over inputs are formed without matrix units. Legend as in ``triton_kernels``; N rows, S chosen.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jackfield_moe.triton_kernels import activated, weight_tile


@triton.jit
def few_up_kernel(
    x, weight, scale, zero, bias, out, experts, outputs, inputs, x_row, w_expert, w_row, s_expert, s_row, b_expert,
    out_row, alpha, limit, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, LAYOUT: tl.constexpr,
    GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, ROW_SCALE: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply each pair's row, and activate; grid: (parts of COLUMNS outputs, P). See ``experts_kernel``."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(1)
    owner = tl.load(experts + pair)
    if owner >= 0:
        expert = owner.to(tl.int64)
        weight += expert * w_expert
        scale += expert * s_expert
        zero += expert * s_expert
        bias += expert * b_expert
        x += (pair // CHOSEN).to(tl.int64) * x_row
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = tl.arange(0, DEPTH)
        gate = tl.zeros((DEPTH, COLUMNS), tl.float32)
        up = tl.zeros((DEPTH, COLUMNS), tl.float32)
        for start in tl.range(0, inputs, DEPTH, num_stages=STAGES):
            depth = start + inside
            row = tl.load(x + depth, mask=depth < inputs, other=0.0).to(tl.float32)[:, None]
            there = (depth[:, None] < inputs) & (column[None, :] < outputs)
            tile = weight_tile(
                weight, scale, zero, column[None, :], depth[:, None], there, w_row, s_row, LAYOUT, GROUP, SCALE_ROWS,
                ZERO, tl.float32,
            )  # fmt: skip
            gate += tile * row
            if GATED:
                tile = weight_tile(
                    weight, scale, zero, (outputs + column)[None, :], depth[:, None], there, w_row, s_row, LAYOUT,
                    GROUP, SCALE_ROWS, ZERO, tl.float32,
                )  # fmt: skip
                up += tile * row
        there = column < outputs
        first = tl.sum(gate, 0)
        second = tl.sum(up, 0)
        if ROW_SCALE:
            first *= tl.load(scale + column * s_row, mask=there, other=0.0).to(tl.float32)
            if GATED:
                second *= tl.load(scale + (outputs + column) * s_row, mask=there, other=0.0).to(tl.float32)
        if BIAS:
            first += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
            if GATED:
                second += tl.load(bias + outputs + column, mask=there, other=0.0).to(tl.float32)
        value = activated(first, second, ACTIVATION, GATED, alpha, limit)
        tl.store(out + pair.to(tl.int64) * out_row + column, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def few_down_kernel(
    x, weight, scale, zero, bias, factors, out, experts, outputs, inputs, x_row, w_expert, w_row, s_expert, s_row,
    b_expert, out_row, CHOSEN: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    LAYOUT: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, ROW_SCALE: tl.constexpr, ZERO: tl.constexpr,
    BIAS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the weighed sum over each row's experts; grid: (parts of COLUMNS outputs, N). A tile has inputs of all
    experts of the row, SLOTS of them, so that there is enough to read at once.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(1).to(tl.int64) * CHOSEN
    slot = tl.arange(0, SLOTS)
    owner = tl.load(experts + first + slot, mask=slot < CHOSEN, other=-1)
    expert = tl.maximum(owner, 0).to(tl.int64)[:, None, None]
    factor = tl.load(factors + first + slot, mask=owner >= 0, other=0.0).to(tl.float32)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, None, :]
    inside = tl.arange(0, DEPTH)
    total = tl.zeros((SLOTS, DEPTH, COLUMNS), tl.float32)
    for start in tl.range(0, inputs, DEPTH, num_stages=STAGES):
        depth = start + inside
        read = (owner >= 0)[:, None] & (depth < inputs)[None, :]
        row = tl.load(x + (first + slot)[:, None] * x_row + depth[None, :], mask=read, other=0.0).to(tl.float32)
        tile = weight_tile(
            weight + expert * w_expert, scale + expert * s_expert, zero + expert * s_expert, column,
            depth[None, :, None], read[:, :, None] & (column < outputs), w_row, s_row, LAYOUT, GROUP, SCALE_ROWS, ZERO,
            tl.float32,
        )  # fmt: skip
        total += tile * (row * factor[:, None])[:, :, None]
    value = tl.sum(total, 1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (owner >= 0)[:, None] & (column < outputs)[None, :]
    expert = tl.maximum(owner, 0).to(tl.int64)[:, None]
    if ROW_SCALE:
        value *= tl.load(scale + expert * s_expert + column[None, :] * s_row, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        added = tl.load(bias + expert * b_expert + column[None, :], mask=mask, other=0.0).to(tl.float32)
        value += added * factor[:, None]
    row_out = out + tl.program_id(1).to(tl.int64) * out_row
    tl.store(row_out + column, tl.sum(value, 0).to(out.dtype.element_ty), mask=column < outputs)
