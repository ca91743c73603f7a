# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Products with a weight of four-bit numbers that is expanded in registers.

A block of BLOCK columns is four planes of WIDE = BLOCK / 4 neighbouring columns. A word of 16 bits holds one column of
each plane, so that a tile of words gives four matrices, each with a shift and a mask, and nothing has to be put in
order. Two words in a register become two numbers of the type of the activations at once: the four bits are the last
ones of the mantissa of 128 (1024 in float16), and 128 and the zero point are subtracted together, exactly. A code has
the zero point in its last eight bits and is the scale in float32 without them. ``w = (number - zero) * scale`` for each
group of columns, where a plane lies in one group.

Legend: T rows of activations (``rows``), I ``inputs``, O ``outputs``, J groups. The weight is the left operand, because
the left one may be tall and may come from registers. Where programs share rows of weight, each leaves its part in
memory; the one that arrives last adds them, in the same order every time, and resets the counter. UNITS: numbers are
expanded with the instructions of a device, two at once. PER: planes that share a group: 1, 2 or 4. PDL: the launch is a
programmatic dependent one (``jackfield_triton.launch``).
"""

from __future__ import annotations

import triton
import triton.language as tl

PLANES = tl.constexpr(4)
EXPAND = tl.constexpr("{ .reg .b32 t, one; shr.b32 t, $1, ")
TO_BFLOAT16 = tl.constexpr(
    "; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, t, one, $2; }"
)
TO_FLOAT16 = tl.constexpr("; lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA; add.rn.f16x2 $0, t, $2; }")
"""EXPAND, the bits that come before a plane, and one of these: two numbers, less what ``$2`` holds."""


@triton.jit
def _plane(words, less, SHIFT: tl.constexpr, UNITS: tl.constexpr, dtype: tl.constexpr):
    """Return one plane of ``words`` less zero points; ``less`` is what :func:`_less` returns."""
    if UNITS and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            EXPAND + SHIFT + TO_BFLOAT16, "=r,r,r", [words, less], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif UNITS:
        return tl.inline_asm_elementwise(
            EXPAND + SHIFT + TO_FLOAT16, "=r,r,r", [words, less], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return (((words >> int(SHIFT)) & 15).to(tl.float32) - less).to(dtype)


@triton.jit
def _less(code, UNITS: tl.constexpr, dtype: tl.constexpr):
    """Return -(128 + zero point), -(1024 + zero point) in float16, or the zero point without UNITS; one more dim."""
    zero = (code & 255).expand_dims(-1)
    if UNITS and dtype == tl.bfloat16:
        return (zero | 0xC300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif UNITS:
        return (zero | 0xE400).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return zero.to(tl.float32)


@triton.jit
def _factor(code):
    """Return the scale in float32; one more dim."""
    return (code & -256).to(tl.float32, bitcast=True).expand_dims(-1)


@triton.jit
def _stored(total, out, bias, row, which, mask, out_row, BIAS: tl.constexpr):
    """Add the bias, round and store; ``total`` [BLOCK_O, BLOCK_T]."""
    if BIAS:
        total += tl.load(bias + row)[:, None].to(tl.float32)
    tl.store(out + which[None, :] * out_row + row[:, None], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _finished(
    total, out, bias, parts, counters, pair, split, splits, row, which, mask, out_row, BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr, MERGE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Store ``total`` [BLOCK_O, BLOCK_T], or add it to what the programs of its ``pair`` have; MERGE bounds them."""
    if MERGE == 1:
        _stored(total, out, bias, row, which, mask, out_row, BIAS)
    else:
        SIZE: tl.constexpr = BLOCK_O * BLOCK_T
        place = parts + pair.to(tl.int64) * splits * SIZE
        place += tl.arange(0, BLOCK_O)[:, None] + tl.arange(0, BLOCK_T)[None, :] * BLOCK_O
        tl.store(place + split * SIZE, total, mask=mask)
        # All threads' parts must be stored before the one thread that counts releases them.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + pair, 1, sem="acq_rel")
        if arrived == splits - 1:
            whole = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
            if MERGE > 0:
                # Unrolled, so that all parts are asked for at once.
                for other in tl.static_range(MERGE):
                    there = mask & (other < splits)
                    whole += tl.load(place + other * SIZE, mask=there, other=0.0, cache_modifier=".cg")
            else:
                for _ in range(splits):
                    whole += tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")
                    place += SIZE
            _stored(whole, out, bias, row, which, mask, out_row, BIAS)
            tl.store(counters + pair, 0)


@triton.jit
def _beside(left, right, BLOCK_O: tl.constexpr, WIDE: tl.constexpr):
    """Return the columns of ``left`` and behind them those of ``right``; nothing moves."""
    return tl.join(left, right).permute(0, 2, 1).reshape(BLOCK_O, 2 * WIDE)


@triton.jit
def _planes(words, code, BLOCK_O: tl.constexpr, WIDE: tl.constexpr, UNITS: tl.constexpr, dtype: tl.constexpr):
    """Return all columns [BLOCK_O, 4 * WIDE] of words, less the zero point of their one group."""
    less = _less(code, UNITS, dtype)
    left = _beside(_plane(words, less, "0", UNITS, dtype), _plane(words, less, "4", UNITS, dtype), BLOCK_O, WIDE)
    right = _beside(_plane(words, less, "8", UNITS, dtype), _plane(words, less, "12", UNITS, dtype), BLOCK_O, WIDE)
    return _beside(left, right, BLOCK_O, 2 * WIDE)


@triton.jit
def _group_sums(
    total, words, codes_of, x, x_rows, rows_here, column, outputs, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PER: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, UNITS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return ``total`` with the block of columns from ``column`` on added. Sums over a group are of whole numbers times
    activations; they are scaled in float32. Products for the larger units of capability 9.0 are formed at once.
    """
    WIDE: tl.constexpr = BLOCK // PLANES
    if PER == 4 and BLOCK_T >= 16:
        code = tl.load(codes_of + column // GROUP * outputs)
        place = x_rows + tl.arange(0, BLOCK)[:, None]
        values = tl.load(x + column + place, mask=rows_here, other=0.0)
        part = tl.dot(_planes(words, code, BLOCK_O, WIDE, UNITS, dtype), values, input_precision="ieee")
        return total + part * _factor(code)
    else:
        place = x_rows + tl.arange(0, WIDE)[:, None]
        for first in tl.static_range(0, 4, PER):
            code = tl.load(codes_of + (column + first * WIDE) // GROUP * outputs)
            less = _less(code, UNITS, dtype)
            part = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
            for plane in tl.static_range(first, first + PER):
                values = tl.load(x + (column + plane * WIDE) + place, mask=rows_here, other=0.0)
                if plane == 0:
                    wide = _plane(words, less, "0", UNITS, dtype)
                elif plane == 1:
                    wide = _plane(words, less, "4", UNITS, dtype)
                elif plane == 2:
                    wide = _plane(words, less, "8", UNITS, dtype)
                else:
                    wide = _plane(words, less, "12", UNITS, dtype)
                part = tl.dot(wide, values, part, input_precision="ieee")
            total += part * _factor(code)
        return total


@triton.jit(do_not_specialize=["rows"])
def packed_few_kernel(
    x, weight, codes, bias, out, parts, counters, rows, outputs, inputs, x_row, out_row,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, PER: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr,
    MERGE: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_T rows. Grid: (parts of BLOCK_O rows of weight, splits of ``inputs``)."""
    block, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    WIDE: tl.constexpr = BLOCK // PLANES
    dtype: tl.constexpr = x.dtype.element_ty
    row = block * BLOCK_O + tl.arange(0, BLOCK_O)
    here = tl.minimum(row, outputs - 1)
    which = tl.arange(0, BLOCK_T)
    tiles = inputs // BLOCK
    each = tl.cdiv(tiles, splits)
    begin = split * each
    end = tl.minimum(begin + each, tiles)
    word = (here * WIDE)[:, None] + tl.arange(0, WIDE)[None, :]
    codes_of = codes + here
    x_rows = (which * x_row)[None, :]
    rows_here = (which < rows)[None, :]
    total = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES):
        words = tl.load(weight + tl.cast(tile, tl.int64) * (outputs * WIDE) + word)
        total = _group_sums(
            total, words, codes_of, x, x_rows, rows_here, tile * BLOCK, outputs, BLOCK, GROUP, PER, BLOCK_O, BLOCK_T,
            UNITS, dtype,
        )  # fmt: skip
    mask = (row < outputs)[:, None] & rows_here
    _finished(
        total, out, bias, parts, counters, block, split, splits, here, which, mask, out_row, BLOCK_O, BLOCK_T, MERGE,
        BIAS,
    )  # fmt: skip


@triton.jit
def _wide(
    words, codes_of, column, outputs, BLOCK: tl.constexpr, GROUP: tl.constexpr, PER: tl.constexpr,
    BLOCK_O: tl.constexpr, UNITS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return the weight [BLOCK_O, BLOCK] of the block of columns from ``column`` on, scaled."""
    WIDE: tl.constexpr = BLOCK // PLANES
    code_0 = tl.load(codes_of + column // GROUP * outputs)
    code_1, code_2, code_3 = code_0, code_0, code_0
    if PER < 4:
        code_2 = tl.load(codes_of + (column + 2 * WIDE) // GROUP * outputs)
        code_3 = code_2
    if PER < 2:
        code_1 = tl.load(codes_of + (column + WIDE) // GROUP * outputs)
        code_3 = tl.load(codes_of + (column + 3 * WIDE) // GROUP * outputs)
    plane_0 = _plane(words, _less(code_0, UNITS, dtype), "0", UNITS, dtype) * _factor(code_0).to(dtype)
    plane_1 = _plane(words, _less(code_1, UNITS, dtype), "4", UNITS, dtype) * _factor(code_1).to(dtype)
    plane_2 = _plane(words, _less(code_2, UNITS, dtype), "8", UNITS, dtype) * _factor(code_2).to(dtype)
    plane_3 = _plane(words, _less(code_3, UNITS, dtype), "12", UNITS, dtype) * _factor(code_3).to(dtype)
    first, second = _beside(plane_0, plane_1, BLOCK_O, WIDE), _beside(plane_2, plane_3, BLOCK_O, WIDE)
    return _beside(first, second, BLOCK_O, 2 * WIDE)


@triton.jit(do_not_specialize=["rows"])
def packed_kernel(
    x, weight, codes, bias, out, parts, counters, rows, outputs, inputs, x_row, out_row,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, PER: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr,
    MERGE: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr, UNITS: tl.constexpr, TMA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Many rows. Grid: (parts of BLOCK_O rows of weight, parts of BLOCK_T rows of x, splits of ``inputs``). Scales are
    rounded to the type of the activations, and so are weights, so that one sum runs through all columns. TMA: ``x`` and
    ``weight`` are descriptors of tiles of BLOCK_T x BLOCK and BLOCK_O x BLOCK / 4, with the weight's blocks below one
    another.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block, slice_, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    WIDE: tl.constexpr = BLOCK // PLANES
    dtype: tl.constexpr = out.dtype.element_ty
    row = block * BLOCK_O + tl.arange(0, BLOCK_O)
    here = tl.minimum(row, outputs - 1)
    which = slice_ * BLOCK_T + tl.arange(0, BLOCK_T)
    tiles = inputs // BLOCK
    each = tl.cdiv(tiles, splits)
    begin = split * each
    end = tl.minimum(begin + each, tiles)
    codes_of = codes + here
    if not TMA:
        word = (here * WIDE)[:, None] + tl.arange(0, WIDE)[None, :]
        place = (tl.minimum(which, rows - 1) * x_row)[None, :] + tl.arange(0, BLOCK)[:, None]
    total = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # Else sums might be kept from the start, and products would wait for one another.
    tl.assume(begin < end)
    for tile in tl.range(begin, end, num_stages=STAGES):
        if TMA:
            words = weight.load([tile * outputs + block * BLOCK_O, 0])
            values = x.load([slice_ * BLOCK_T, tile * BLOCK]).T
        else:
            words = tl.load(weight + tl.cast(tile, tl.int64) * (outputs * WIDE) + word)
            values = tl.load(x + tile * BLOCK + place)
        wide = _wide(words, codes_of, tile * BLOCK, outputs, BLOCK, GROUP, PER, BLOCK_O, UNITS, dtype)
        total = tl.dot(wide, values, total, input_precision="ieee")
    mask = (row < outputs)[:, None] & (which < rows)[None, :]
    pair = block * tl.num_programs(1) + slice_
    _finished(
        total, out, bias, parts, counters, pair, split, splits, here, which, mask, out_row, BLOCK_O, BLOCK_T, MERGE,
        BIAS,
    )  # fmt: skip
