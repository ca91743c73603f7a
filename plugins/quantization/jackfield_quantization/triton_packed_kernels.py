# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Products with a weight of four-bit numbers that is expanded in registers.

A byte holds two columns of a block of BLOCK: column b in its low and column b + BLOCK / 2 in its high half, so that
both halves of a tile are matrices of their own and nothing has to be put in order. ``w = (number - zero) * scale`` for
each group of columns, rounded to the type of the activations, as dequantization rounds it.

Legend: T rows of activations (``rows``), I ``inputs``, O ``outputs``. The weight is the left operand, because the left
one may be tall and may come from registers. Where programs share rows of weight, each leaves its part in memory; the
one that arrives last adds them, in the same order every time, and resets the counter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _half(
    numbers, column, total, x, x_rows, scale, zero, row, rows_here, outputs, groups, GROUP: tl.constexpr,
    SPREAD: tl.constexpr,
):  # fmt: skip
    """Return ``total`` with one half of a tile times all rows added. ``column`` [N] are its columns; SPREAD: they may
    belong to several groups.
    """
    values = tl.load(x + x_rows + column[:, None], mask=rows_here, other=0.0)
    if SPREAD:
        place = row[:, None] * groups + (column // GROUP)[None, :]
        here = (row < outputs)[:, None]
        factor = tl.load(scale + place, mask=here, other=0.0).to(tl.float32)
        point = tl.load(zero + place, mask=here, other=0).to(tl.float32)
    else:
        place = row * groups + tl.min(column, 0) // GROUP
        factor = tl.load(scale + place, mask=row < outputs, other=0.0).to(tl.float32)[:, None]
        point = tl.load(zero + place, mask=row < outputs, other=0).to(tl.float32)[:, None]
    wide = ((numbers.to(tl.float32) - point) * factor).to(values.dtype)
    return tl.dot(wide, values, total, input_precision="ieee")


@triton.jit
def _stored(total, out, bias, row, which, mask, out_row, BIAS: tl.constexpr):
    """Add the bias, round and store; ``total`` [BLOCK_O, BLOCK_T]."""
    if BIAS:
        total += tl.load(bias + row, mask=row >= 0, other=0.0).to(tl.float32)[:, None]
    tl.store(out + which[None, :] * out_row + row[:, None], total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def packed_kernel(
    x, weight, scale, zero, bias, out, parts, counters, rows, outputs, inputs, groups, x_row, out_row,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, TILES: tl.constexpr,
    MERGE: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (parts of BLOCK_O rows of weight, parts of BLOCK_T rows of x, splits of ``inputs``). A tile has TILES
    blocks of BLOCK columns; ``inputs`` is a multiple of BLOCK. MERGE bounds the splits.
    """
    block, slice_, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    HALF: tl.constexpr = BLOCK // 2
    STEP: tl.constexpr = BLOCK * TILES
    inside = tl.arange(0, HALF * TILES)
    low = inside // HALF * BLOCK + inside % HALF
    row = block * BLOCK_O + tl.arange(0, BLOCK_O)
    which = slice_ * BLOCK_T + tl.arange(0, BLOCK_T)
    real = row < outputs
    each = tl.cdiv(tl.cdiv(inputs, STEP), splits) * STEP
    begin = split * each
    end = tl.minimum(begin + each, inputs)
    bytes_of = weight + row.to(tl.int64)[:, None] * (inputs // 2)
    x_rows = which.to(tl.int64)[None, :] * x_row
    total = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for first in tl.range(begin, end, STEP, num_stages=STAGES):
        column = first + low
        there = column < end
        stored = tl.load(
            bytes_of + (first // 2 + inside)[None, :], mask=real[:, None] & there[None, :], other=0,
            eviction_policy="evict_first",
        )  # fmt: skip
        rows_here = there[:, None] & (which < rows)[None, :]
        total = _half(
            stored & 15, tl.where(there, column, first), total, x, x_rows, scale, zero, row, rows_here, outputs, groups,
            GROUP, TILES > 1 or GROUP % HALF != 0,
        )  # fmt: skip
        total = _half(
            stored >> 4, tl.where(there, column + HALF, first + HALF), total, x, x_rows, scale, zero, row, rows_here,
            outputs, groups, GROUP, TILES > 1 or GROUP % HALF != 0,
        )  # fmt: skip
    mask = real[:, None] & (which < rows)[None, :]
    if MERGE == 1:
        _stored(total, out, bias, row, which, mask, out_row, BIAS)
    else:
        SIZE: tl.constexpr = BLOCK_O * BLOCK_T
        pair = block * tl.num_programs(1) + slice_
        place = parts + pair.to(tl.int64) * splits * SIZE
        place += tl.arange(0, BLOCK_O)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        tl.store(place + split * SIZE, total)
        # All threads' parts must be stored before the one thread that counts releases them.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + pair, 1, sem="acq_rel")
        if arrived == splits - 1:
            whole = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
            for other in tl.static_range(MERGE):
                here = other < splits
                whole += tl.load(place + other * SIZE, mask=mask & here, other=0.0, cache_modifier=".cg")
            _stored(whole, out, bias, row, which, mask, out_row, BIAS)
            tl.store(counters + pair, 0)
