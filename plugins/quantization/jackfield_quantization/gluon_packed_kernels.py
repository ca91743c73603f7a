# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Products of up to 16 rows with a weight of four-bit numbers, in Gluon: what ``packed_few_kernel`` computes.

A program has 16 rows of weight and all their columns, a step of which is SLICES blocks of 128 columns. Each warp has
blocks of its own, so that warps wait for one another only at the end, when what they have is added up. Words and
activations are loaded into the registers that the matrix units take them from, eight neighbouring columns a thread:
which columns the units call neighbours does not matter to a sum, as long as both operands agree. So nothing passes
through shared memory before that end, and what one program needs of the weight is on its way at once.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from jackfield_quantization.triton_packed_kernels import EXPAND, TO_BFLOAT16, TO_FLOAT16

OUTPUTS = gl.constexpr(16)
"""Rows of weight of a program: those of one instruction."""
WIDE = gl.constexpr(32)
"""Columns of a plane."""
BLOCK = gl.constexpr(128)
FOURS = gl.constexpr(4)
"""Columns that a thread of an operand has beside one another; as many again lie half of WIDE behind."""


@gluon.jit
def _plane(words, less, SHIFT: gl.constexpr, dtype: gl.constexpr):
    """Return one plane of ``words`` less zero points. Every second word of ``less`` is looked at; each of them
    has the number twice.
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            EXPAND + SHIFT + TO_BFLOAT16, "=r,r,r,r", [words, less], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            EXPAND + SHIFT + TO_FLOAT16, "=r,r,r,r", [words, less], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.constexpr_function
def _loads(slices, warps, others, axis):
    """Return how a tile [S, O, W] of words (axis 2) or [S, W, T] of activations (axis 1) is loaded: by a thread eight
    neighbouring columns, by eight threads each of as many of ``others``, by each warp its blocks.
    """

    def at(dim, size):
        return [size if place == dim else 0 for place in range(3)]

    other = 3 - axis
    registers = [at(axis, 1), at(axis, 2), at(axis, 4)] + ([at(other, 8)] if others == 16 else [])
    registers += [at(0, size) for size in (1, 2, 4, 8, 16, 32) if warps <= size < slices]
    lanes = [at(axis, 8), at(axis, 16), at(other, 1), at(other, 2), at(other, 4)]
    shape = [slices, others, 32] if axis == 2 else [slices, 32, others]
    return gl.DistributedLinearLayout(
        registers, lanes, [at(0, 1 << i) for i in range(warps.bit_length() - 1)], [], shape
    )


@gluon.jit
def _as_operand(tile, LAYOUT: gl.constexpr, AXIS: gl.constexpr):
    """Return a tile as an operand, of which a thread's first and last four columns lie half of W apart: columns of both
    operands are named anew, in the same way, and nothing moves.
    """
    if AXIS == 2:
        named = tile.reshape([tile.shape[0], tile.shape[1], 4, 2, 4]).permute([0, 1, 3, 2, 4])
    else:
        named = tile.reshape([tile.shape[0], 4, 2, 4, tile.shape[2]]).permute([0, 2, 1, 3, 4])
    named = named.reshape([tile.shape[0], tile.shape[1], tile.shape[2]])
    return gl.convert_layout(named, LAYOUT, assert_trivial=True)


@gluon.jit
def _words(weight, word, tile, tiles, outputs):
    """Return the words of blocks, [S, O, W]; zeros stand for blocks behind the last."""
    place = tile.to(gl.int64) * (outputs * WIDE) + word
    return gl.load(weight + place, mask=tile < tiles, other=0, eviction_policy="evict_first")


@gluon.jit
def _codes(codes, row, column, inputs, outputs, GROUP: gl.constexpr):
    """Return the codes of columns [S, 1] for rows [1, O] of weight; behind the last column scales are zeros."""
    return gl.load(codes + column // GROUP * outputs + row, mask=column < inputs, other=0)


@gluon.jit
def _part(part, place, here, words, less, FIRST: gl.constexpr, PER: gl.constexpr, RIGHT: gl.constexpr):
    """Return ``part`` with the products of PER planes added."""
    dtype: gl.constexpr = place.dtype.element_ty
    for plane in gl.static_range(FIRST, FIRST + PER):
        values = _as_operand(gl.load(place + plane * WIDE, mask=here, other=0.0), RIGHT, 1)
        if plane == 0:
            wide = _plane(words, less, "0", dtype)
        elif plane == 1:
            wide = _plane(words, less, "4", dtype)
        elif plane == 2:
            wide = _plane(words, less, "8", dtype)
        else:
            wide = _plane(words, less, "12", dtype)
        part = mma_v2(wide, values, part)
    return part


@gluon.jit
def _less(code, dtype: gl.constexpr):
    """Return -(128 + zero point), -(1024 + zero point) in float16, twice in each word; one more dim."""
    zeros = (code & 255) * 0x10001
    if dtype == gl.bfloat16:
        return (zeros | -0x3CFF3D00)[:, :, None]
    else:
        return (zeros | -0x1BFF1C00)[:, :, None]


@gluon.jit
def _store(
    whole, out, bias, rows, outputs, out_row, ROWS: gl.constexpr, BIAS: gl.constexpr, UNITS: gl.constexpr
):  # fmt: skip
    """Add the bias to sums [O, T], round and store them."""
    column = gl.program_id(0) * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, gl.SliceLayout(0, UNITS)))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(0, UNITS)))
    if BIAS:
        whole += gl.load(bias + column, mask=column < outputs, other=0.0).to(gl.float32)[:, None]
    mask = (column < outputs)[:, None] & (row < rows)[None, :]
    gl.store(out + row[None, :] * out_row + column[:, None], whole.to(out.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["rows"])
def sliced_kernel(
    x, weight, codes, bias, out, rows, outputs, inputs, x_row, out_row, ROWS: gl.constexpr, GROUP: gl.constexpr,
    PER: gl.constexpr, SLICES: gl.constexpr, WARPS: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: parts of OUTPUTS rows of weight. PER: planes that share a group: 1, 2 or 4. PDL: as in
    ``triton_packed_kernels``. Words are asked for two steps ahead, those of the first two steps before the wait.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    UNITS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, UNITS, FOURS)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, UNITS, FOURS)
    WORDS: gl.constexpr = _loads(SLICES, WARPS, OUTPUTS, 2)
    ROWS_OF_X: gl.constexpr = _loads(SLICES, WARPS, ROWS, 1)
    dtype: gl.constexpr = x.dtype.element_ty
    tiles = inputs // BLOCK
    slice_ = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))[:, None]
    row = gl.program_id(0) * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(0, gl.SliceLayout(2, LEFT)))
    row = gl.minimum(row, outputs - 1)[None, :]
    block = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))[:, None][:, :, None]
    line = gl.program_id(0) * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    inside = gl.arange(0, WIDE, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, :]
    word = gl.minimum(line, outputs - 1)[None, :][:, :, None] * WIDE + inside[:, None, :]
    x_slice = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, ROWS_OF_X)))[:, None][:, :, None]
    x_inside = gl.arange(0, WIDE, gl.SliceLayout(0, gl.SliceLayout(2, ROWS_OF_X)))[None, :][:, :, None]
    which = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, ROWS_OF_X)))[None, :][:, None, :]
    total = gl.zeros([SLICES, OUTPUTS, ROWS], gl.float32, UNITS)
    words = _words(weight, word, block, tiles, outputs)
    code = _codes(codes, row, slice_ * BLOCK, inputs, outputs, GROUP)
    words_1 = _words(weight, word, SLICES + block, tiles, outputs)
    code_1 = _codes(codes, row, (SLICES + slice_) * BLOCK, inputs, outputs, GROUP)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for first in range(0, tiles, SLICES):
        words_2 = _words(weight, word, first + 2 * SLICES + block, tiles, outputs)
        code_2 = _codes(codes, row, (first + 2 * SLICES + slice_) * BLOCK, inputs, outputs, GROUP)
        tile = first + x_slice
        here = (tile < tiles) & (which < rows)
        place = x + (which * x_row + tile * BLOCK + x_inside)
        left = _as_operand(words, LEFT, 2)
        for group in gl.static_range(0, 4, PER):
            if group > 0:
                code = _codes(codes, row, (first + slice_) * BLOCK + group * WIDE, inputs, outputs, GROUP)
            part = gl.zeros([SLICES, OUTPUTS, ROWS], gl.float32, UNITS)
            part = _part(part, place, here, left, _less(code, dtype), group, PER, RIGHT)
            scale = (code & -256).to(gl.float32, bitcast=True)
            total += part * gl.convert_layout(scale, gl.SliceLayout(2, UNITS))[:, :, None]
        words, code, words_1, code_1 = words_1, code_1, words_2, code_2
    whole = gl.sum(total, 0)
    _store(whole, out, bias, rows, outputs, out_row, ROWS, BIAS, UNITS)
