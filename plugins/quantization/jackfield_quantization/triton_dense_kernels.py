# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Products of few rows of activations with a dense weight, which is read once and never kept in the cache.

Legend: T rows of activations (``rows``, padded to ROWS), I ``inputs``, O ``outputs``. Sums are formed in float32 in an
order that does not change from launch to launch. Where programs share rows of weight, each leaves its part in memory;
the one that arrives last adds them and resets the counter. PDL: the launch is a programmatic dependent one
(``jackfield_triton.launch``); the first AHEAD tiles of weight are read before the wait, everything else after it.

What comes before and after a product can be folded into it, each of which is a launch less:

- NORM: the root-mean-square norm of the activations. Its factor is one number for each row, so that the product is
  formed of rows that are only weighted, and their squares are summed on the way. With ADDED the rows are those of
  ``x`` and ``residual`` together, and the first program leaves their sum in ``kept``.
- GATE: the activation of the first half of the outputs, times the second half. A program then holds as many rows of
  one half as of the other, in turns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jackfield_triton.activation import activated

SHRUNK = tl.constexpr(64.0)
"""Rows that are weighted but not yet normal may leave float16's range, so matrix units get them smaller by this."""


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
def _factors(factor, column, inputs, NORM: tl.constexpr):
    """Return the weight of the norm at some columns; nothing of use without NORM."""
    if NORM:
        return tl.load(factor + column, mask=column < inputs, other=0.0, eviction_policy="evict_last")
    else:
        return column


@triton.jit
def _weighted(values, other, factors, squares, kept, place, mask, first, ADDED: tl.constexpr):
    """Return (``values``, with ADDED plus ``other``, times ``factors``; ``squares`` plus those of what was weighted),
    all in float32. The ``first`` program stores what ADDED makes at ``place``.
    """
    if ADDED:
        # As a kernel of its own would leave it.
        rounded = (values + other).to(kept.dtype.element_ty)
        tl.store(kept + place, rounded, mask=mask & first)
        values = rounded.to(tl.float32)
    return values * factors, squares + values * values


@triton.jit
def _added(
    sum_0, sum_1, sum_2, sum_3, squares, x, residual, factor, kept, weight, column, last, inputs, x_row, first,
    ROWS: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Return the sums with one tile of ``weight`` times each row added, and those of squares; rows past the ``last``
    repeat it.
    """
    weight = weight.to(tl.float32)
    values = _activation(x, column, inputs, EVEN)
    if NORM:
        other = values
        if ADDED:
            other = _activation(residual, column, inputs, EVEN)
        factors = _activation(factor, column, inputs, EVEN)
        values, squares = _weighted(values, other, factors, squares, kept, column, column < inputs, first, ADDED)
    sum_0 += weight * values
    if ROWS > 1:
        sum_1 += weight * _activation(x + tl.minimum(1, last) * x_row, column, inputs, EVEN)
    if ROWS > 2:
        sum_2 += weight * _activation(x + tl.minimum(2, last) * x_row, column, inputs, EVEN)
        sum_3 += weight * _activation(x + tl.minimum(3, last) * x_row, column, inputs, EVEN)
    return sum_0, sum_1, sum_2, sum_3, squares


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
    x, residual, factor, kept, weight_rows, begin, end, rows, inputs, x_row, eps, first, ROWS: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr,
    ADDED: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return [BLOCK_O, ROWS] for up to four rows (one with NORM); each place of a tile keeps its own sum until the
    end.
    """
    tl.static_assert(ROWS == 1 or not NORM)
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
    squares = tl.zeros((1, BLOCK_I), tl.float32)
    last = rows - 1
    if AHEAD > 0:
        sum_0, sum_1, sum_2, sum_3, squares = _added(
            sum_0, sum_1, sum_2, sum_3, squares, x, residual, factor, kept, first_weight, begin + inside, last, inputs,
            x_row, first, ROWS, EVEN, NORM, ADDED
        )  # fmt: skip
    if AHEAD > 1:
        sum_0, sum_1, sum_2, sum_3, squares = _added(
            sum_0, sum_1, sum_2, sum_3, squares, x, residual, factor, kept, second_weight, begin + BLOCK_I + inside,
            last, inputs, x_row, first, ROWS, EVEN, NORM, ADDED
        )  # fmt: skip
    for at in tl.range(begin + AHEAD * BLOCK_I, end, BLOCK_I, num_stages=STAGES):
        weight = _weight_tile(weight_rows, at + inside, inputs, EVEN)
        sum_0, sum_1, sum_2, sum_3, squares = _added(
            sum_0, sum_1, sum_2, sum_3, squares, x, residual, factor, kept, weight, at + inside, last, inputs, x_row,
            first, ROWS, EVEN, NORM, ADDED
        )  # fmt: skip
    total = _row_sums(sum_0, sum_1, sum_2, sum_3, ROWS)
    if NORM:
        total *= tl.rsqrt(tl.sum(squares, 1)[:, None] / inputs + eps)
    return total


@triton.jit
def _places(column, rows, inputs, x_row, ROWS: tl.constexpr):
    """Return (offsets, which of them are there) [..., BLOCK_I, ROWS] of activations; ``column`` [..., BLOCK_I, 1]."""
    which = tl.arange(0, ROWS)[None, :]
    return which * x_row + column, (column < inputs) & (which < rows)


@triton.jit
def _activations(x, residual, column, rows, inputs, x_row, ROWS: tl.constexpr, ADDED: tl.constexpr):
    """Return (activations of a tile, those of ``residual``, or the former again without ADDED)."""
    place, mask = _places(column, rows, inputs, x_row, ROWS)
    values = tl.load(x + place, mask=mask, other=0.0, eviction_policy="evict_last")
    if ADDED:
        return values, tl.load(residual + place, mask=mask, other=0.0, eviction_policy="evict_last")
    else:
        return values, values


@triton.jit
def _dotted(
    total, squares, values, other, factors, kept, weight, column, rows, inputs, x_row, first, ROWS: tl.constexpr,
    NORM: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Return ``total`` with one tile of ``weight`` times its activations added, and ``squares`` with theirs at each
    place; with NORM the former are smaller by SHRUNK.
    """
    if NORM:
        place, mask = _places(column, rows, inputs, x_row, ROWS)
        small = factors.to(tl.float32) * (1 / SHRUNK)
        wide, squares = _weighted(
            values.to(tl.float32), other.to(tl.float32), small, squares, kept, place, mask, first, ADDED
        )  # fmt: skip
        values = wide.to(values.dtype)
    return tl.dot(weight.to(values.dtype), values, total, input_precision="ieee"), squares


@triton.jit
def _on_matrix_units(
    x, residual, factor, kept, weight_rows, begin, end, rows, inputs, x_row, eps, first, ROWS: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, SLICES: tl.constexpr,
    NORM: tl.constexpr, ADDED: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return [BLOCK_O, ROWS]. The weight is the left operand, because the left one may be tall. With SLICES a tile is
    as many products side by side, each of its part of BLOCK_I, which are added up at the end: every warp then has a
    part of the weight for itself, and few products follow one another.
    """
    if SLICES > 1:
        PART: tl.constexpr = BLOCK_I // SLICES
        inside = tl.arange(0, SLICES)[:, None] * PART + tl.arange(0, PART)[None, :]
        across, along = inside[:, None, :], inside[:, :, None]
        weight_rows = weight_rows[None, :, :]
        total = tl.zeros((SLICES, BLOCK_O, ROWS), tl.float32)
        squares = tl.zeros((SLICES, PART, ROWS), tl.float32)
    else:
        inside = tl.arange(0, BLOCK_I)
        across, along = inside[None, :], inside[:, None]
        total = tl.zeros((BLOCK_O, ROWS), tl.float32)
        squares = tl.zeros((BLOCK_I, ROWS), tl.float32)
    if AHEAD > 0:
        first_weight = _weight_tile(weight_rows, begin + across, inputs, EVEN)
        first_factors = _factors(factor, begin + along, inputs, NORM)
    if AHEAD > 1:
        second_weight = _weight_tile(weight_rows, begin + BLOCK_I + across, inputs, EVEN)
        second_factors = _factors(factor, begin + BLOCK_I + along, inputs, NORM)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if AHEAD > 0:
        first_x, first_other = _activations(x, residual, begin + along, rows, inputs, x_row, ROWS, ADDED)
    if AHEAD > 1:
        second_x, second_other = _activations(x, residual, begin + BLOCK_I + along, rows, inputs, x_row, ROWS, ADDED)
    if AHEAD > 0:
        total, squares = _dotted(
            total, squares, first_x, first_other, first_factors, kept, first_weight, begin + along, rows, inputs,
            x_row, first, ROWS, NORM, ADDED
        )  # fmt: skip
    if AHEAD > 1:
        total, squares = _dotted(
            total, squares, second_x, second_other, second_factors, kept, second_weight, begin + BLOCK_I + along, rows,
            inputs, x_row, first, ROWS, NORM, ADDED
        )  # fmt: skip
    for at in tl.range(begin + AHEAD * BLOCK_I, end, BLOCK_I, num_stages=STAGES):
        weight = _weight_tile(weight_rows, at + across, inputs, EVEN)
        factors = _factors(factor, at + along, inputs, NORM)
        values, other = _activations(x, residual, at + along, rows, inputs, x_row, ROWS, ADDED)
        total, squares = _dotted(
            total, squares, values, other, factors, kept, weight, at + along, rows, inputs, x_row, first, ROWS, NORM,
            ADDED
        )  # fmt: skip
    if SLICES > 1:
        total, squares = tl.sum(total, 0), tl.sum(squares, 0)
    if NORM:
        total *= SHRUNK * tl.rsqrt(tl.sum(squares, 0) / inputs + eps)[None, :]
    return total


@triton.jit
def _store(
    total, out, scale, bias, block, row, outputs, rows, out_row, ROWS: tl.constexpr, BLOCK_O: tl.constexpr,
    SCALE: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Scale, add the bias, apply the gate, round and store; ``total`` [BLOCK_O, ROWS], ``row`` [BLOCK_O, 1] are rows
    of weight.
    """
    mask = row < outputs
    if SCALE:
        total *= tl.load(scale + row, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias + row, mask=mask, other=0.0).to(tl.float32)
    which = tl.arange(0, ROWS)[None, :]
    if GATE != "":
        HALF: tl.constexpr = BLOCK_O // 2
        gate, up = tl.split(tl.permute(tl.reshape(total, (HALF, 2, ROWS)), (0, 2, 1)))
        gate = activated(gate.to(out.dtype.element_ty).to(tl.float32), GATE).to(out.dtype.element_ty).to(tl.float32)
        column = block * HALF + tl.arange(0, HALF)[:, None]
        result = gate * up.to(out.dtype.element_ty).to(tl.float32)
        inside = (column < outputs // 2) & (which < rows)
        tl.store(out + which * out_row + column, result.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + which * out_row + row, total.to(out.dtype.element_ty), mask=mask & (which < rows))


@triton.jit
def _rows_of_weight(block, outputs, BLOCK_O: tl.constexpr, GATE: tl.constexpr):
    """Return [BLOCK_O, 1]: the rows of a program; those past the end are ``outputs`` or more."""
    inside = tl.arange(0, BLOCK_O)[:, None]
    if GATE != "":
        half = outputs // 2
        column = block * (BLOCK_O // 2) + inside // 2
        return tl.where(column < half, column + inside % 2 * half, outputs)
    else:
        return block * BLOCK_O + inside


@triton.jit(do_not_specialize=["rows"])
def skinny_kernel(
    x, residual, factor, kept, weight, scale, bias, out, parts, counters, rows, outputs, inputs, x_row, weight_row,
    out_row, eps, ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, MERGE: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, MATRIX: tl.constexpr, SLICES: tl.constexpr, SCALE: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, ADDED: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Grid: (parts of BLOCK_O rows of weight, splits of ``inputs``). EVEN: ``inputs`` is a multiple of BLOCK_I; MERGE
    bounds the splits. Every split has at least AHEAD tiles. MATRIX: on matrix units, a tile in SLICES. SCALE: the
    weight is of a narrow type, and ``scale`` [O] float32 belongs to its rows. NORM (with one split): ``factor`` [I] is
    the weight of the norm and ``eps`` is added to the mean square; ``residual`` and ``kept``, the sums, are laid out
    as ``x`` is. GATE: the name of an activation, or empty.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.static_assert(MERGE == 1 or not NORM)
    block, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = _rows_of_weight(block, outputs, BLOCK_O, GATE)
    each = tl.cdiv(tl.cdiv(inputs, BLOCK_I), splits) * BLOCK_I
    begin = split * each
    end = tl.minimum(begin + each, inputs)
    weight_rows = weight + tl.minimum(row, outputs - 1).to(tl.int64) * weight_row
    if MATRIX:
        total = _on_matrix_units(
            x, residual, factor, kept, weight_rows, begin, end, rows, inputs, x_row, eps, block == 0, ROWS, BLOCK_O,
            BLOCK_I, STAGES, EVEN, SLICES, NORM, ADDED, PDL, AHEAD
        )  # fmt: skip
    else:
        total = _multiplied(
            x, residual, factor, kept, weight_rows, begin, end, rows, inputs, x_row, eps, block == 0, ROWS, BLOCK_O,
            BLOCK_I, STAGES, EVEN, NORM, ADDED, PDL, AHEAD
        )  # fmt: skip
    if MERGE == 1:
        _store(total, out, scale, bias, block, row, outputs, rows, out_row, ROWS, BLOCK_O, SCALE, BIAS, GATE)
    else:
        SIZE: tl.constexpr = ROWS * BLOCK_O
        which, inside = tl.arange(0, ROWS)[None, :], tl.arange(0, BLOCK_O)[:, None]
        mask = (row < outputs) & (which < rows)
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
            _store(whole, out, scale, bias, block, row, outputs, rows, out_row, ROWS, BLOCK_O, SCALE, BIAS, GATE)
            tl.store(counters + block, 0)
