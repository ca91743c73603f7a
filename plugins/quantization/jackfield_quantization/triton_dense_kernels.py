# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Products of few rows of activations with a dense weight, which is read once and never kept in the cache.

Legend: T rows of activations (``rows``, padded to ROWS), I ``inputs``, O ``outputs``. Sums are formed in float32 in an
order that does not change from launch to launch. Where programs share rows of weight, each leaves its part in memory;
the one that arrives last adds them and resets the counter. PDL: the launch is a programmatic dependent one
(``jackfield_triton.launch``); the first AHEAD tiles of weight are read before the wait, everything else after it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _weight_tile(weight_rows, column, inputs, EVEN: tl.constexpr):
    """Return columns of some rows; ``column`` [1, BLOCK_I]."""
    if EVEN:
        return tl.load(weight_rows + column, eviction_policy="evict_first")
    else:
        return tl.load(weight_rows + column, mask=column < inputs, other=0.0, eviction_policy="evict_first")


@triton.jit
def _activation(x, column, inputs, EVEN: tl.constexpr):
    """Return columns of one row of activations, in float32; ``column`` [1, BLOCK_I]."""
    if EVEN:
        return tl.load(x + column, eviction_policy="evict_last").to(tl.float32)
    else:
        return tl.load(x + column, mask=column < inputs, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def _added(
    sum_0, sum_1, sum_2, sum_3, x, weight, column, last, inputs, x_row, ROWS: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Return the sums with one tile of ``weight`` times each row added; rows past the ``last`` repeat it."""
    weight = weight.to(tl.float32)
    sum_0 += weight * _activation(x, column, inputs, EVEN)
    if ROWS > 1:
        sum_1 += weight * _activation(x + tl.minimum(1, last) * x_row, column, inputs, EVEN)
    if ROWS > 2:
        sum_2 += weight * _activation(x + tl.minimum(2, last) * x_row, column, inputs, EVEN)
        sum_3 += weight * _activation(x + tl.minimum(3, last) * x_row, column, inputs, EVEN)
    return sum_0, sum_1, sum_2, sum_3


@triton.jit
def _row_sums(sum_0, sum_1, sum_2, sum_3, ROWS: tl.constexpr):
    """Return [BLOCK_O, ROWS]: each sum over its columns."""
    which = tl.arange(0, ROWS)[None, :]
    total = tl.sum(sum_0, 1)[:, None]
    if ROWS > 1:
        total = tl.where(which == 1, tl.sum(sum_1, 1)[:, None], total)
    if ROWS > 2:
        total = tl.where(which == 2, tl.sum(sum_2, 1)[:, None], total)
        total = tl.where(which == 3, tl.sum(sum_3, 1)[:, None], total)
    return total


@triton.jit
def _multiplied(
    x, weight_rows, begin, end, rows, inputs, x_row, ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return [BLOCK_O, ROWS] for up to four rows; each place of a tile keeps its own sum until the end."""
    inside = tl.arange(0, BLOCK_I)[None, :]
    if AHEAD > 0:
        first_weight = _weight_tile(weight_rows, begin + inside, inputs, EVEN)
    if AHEAD > 1:
        second_weight = _weight_tile(weight_rows, begin + BLOCK_I + inside, inputs, EVEN)
    if PDL:
        tl.extra.cuda.gdc_wait()
    sum_0 = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    sum_1 = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    sum_2 = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    sum_3 = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    last = rows - 1
    if AHEAD > 0:
        sum_0, sum_1, sum_2, sum_3 = _added(
            sum_0, sum_1, sum_2, sum_3, x, first_weight, begin + inside, last, inputs, x_row, ROWS, EVEN
        )  # fmt: skip
    if AHEAD > 1:
        sum_0, sum_1, sum_2, sum_3 = _added(
            sum_0, sum_1, sum_2, sum_3, x, second_weight, begin + BLOCK_I + inside, last, inputs, x_row, ROWS, EVEN
        )  # fmt: skip
    for first in tl.range(begin + AHEAD * BLOCK_I, end, BLOCK_I, num_stages=STAGES):
        weight = _weight_tile(weight_rows, first + inside, inputs, EVEN)
        sum_0, sum_1, sum_2, sum_3 = _added(
            sum_0, sum_1, sum_2, sum_3, x, weight, first + inside, last, inputs, x_row, ROWS, EVEN
        )  # fmt: skip
    return _row_sums(sum_0, sum_1, sum_2, sum_3, ROWS)


@triton.jit
def _dotted(total, x, weight, column, rows, inputs, x_row, ROWS: tl.constexpr):
    """Return ``total`` with one tile of ``weight`` times all rows added; ``column`` [BLOCK_I]."""
    which = tl.arange(0, ROWS)[None, :]
    mask = (column < inputs)[:, None] & (which < rows)
    values = tl.load(x + which * x_row + column[:, None], mask=mask, other=0.0, eviction_policy="evict_last")
    return tl.dot(weight.to(values.dtype), values, total, input_precision="ieee")


@triton.jit
def _on_matrix_units(
    x, weight_rows, begin, end, rows, inputs, x_row, ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return [BLOCK_O, ROWS]. The weight is the left operand, because the left one may be tall."""
    inside = tl.arange(0, BLOCK_I)
    if AHEAD > 0:
        first_weight = _weight_tile(weight_rows, begin + inside[None, :], inputs, EVEN)
    if AHEAD > 1:
        second_weight = _weight_tile(weight_rows, begin + BLOCK_I + inside[None, :], inputs, EVEN)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_O, ROWS), tl.float32)
    if AHEAD > 0:
        total = _dotted(total, x, first_weight, begin + inside, rows, inputs, x_row, ROWS)
    if AHEAD > 1:
        total = _dotted(total, x, second_weight, begin + BLOCK_I + inside, rows, inputs, x_row, ROWS)
    for first in tl.range(begin + AHEAD * BLOCK_I, end, BLOCK_I, num_stages=STAGES):
        column = first + inside
        weight = _weight_tile(weight_rows, column[None, :], inputs, EVEN)
        total = _dotted(total, x, weight, column, rows, inputs, x_row, ROWS)
    return total


@triton.jit
def _store(total, out, scale, bias, row, mask, out_row, ROWS: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr):
    """Scale, add the bias, round and store; ``total`` [BLOCK_O, ROWS], ``row`` [BLOCK_O, 1] are rows of weight."""
    if SCALE:
        total *= tl.load(scale + row, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias + row, mask=mask, other=0.0).to(tl.float32)
    place = out + tl.arange(0, ROWS)[None, :] * out_row + row
    tl.store(place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def skinny_kernel(
    x, weight, scale, bias, out, parts, counters, rows, outputs, inputs, x_row, weight_row, out_row,
    ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, MERGE: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, MATRIX: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Grid: (parts of BLOCK_O rows of weight, splits of ``inputs``). EVEN: ``inputs`` is a multiple of BLOCK_I; MERGE
    bounds the splits. Every split has at least AHEAD tiles. SCALE: the weight is of a narrow type, and ``scale`` [O]
    float32 belongs to its rows.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    inside = tl.arange(0, BLOCK_O)[:, None]
    row = block * BLOCK_O + inside
    each = tl.cdiv(tl.cdiv(inputs, BLOCK_I), splits) * BLOCK_I
    begin = split * each
    end = tl.minimum(begin + each, inputs)
    weight_rows = weight + tl.minimum(row, outputs - 1).to(tl.int64) * weight_row
    if MATRIX:
        total = _on_matrix_units(
            x, weight_rows, begin, end, rows, inputs, x_row, ROWS, BLOCK_O, BLOCK_I, STAGES, EVEN, PDL, AHEAD
        )  # fmt: skip
    else:
        total = _multiplied(
            x, weight_rows, begin, end, rows, inputs, x_row, ROWS, BLOCK_O, BLOCK_I, STAGES, EVEN, PDL, AHEAD
        )  # fmt: skip
    which = tl.arange(0, ROWS)[None, :]
    mask = (row < outputs) & (which < rows)
    if MERGE == 1:
        _store(total, out, scale, bias, row, mask, out_row, ROWS, SCALE, BIAS)
    else:
        SIZE: tl.constexpr = ROWS * BLOCK_O
        place = parts + block * splits * SIZE + which * BLOCK_O + inside
        tl.store(place + split * SIZE, total, mask=mask)
        # All threads' parts must be stored before the one thread that counts releases them.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + block, 1, sem="acq_rel")
        if arrived == splits - 1:
            whole = tl.zeros((BLOCK_O, ROWS), tl.float32)
            # Unrolled, so that all parts are asked for at once.
            for other in tl.static_range(MERGE):
                here = mask & (other < splits)
                whole += tl.load(place + other * SIZE, mask=here, other=0.0, cache_modifier=".cg")
            _store(whole, out, scale, bias, row, mask, out_row, ROWS, SCALE, BIAS)
            tl.store(counters + block, 0)
