# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Latent attention of single new tokens on capability 9.0: what ``mla_decode_kernel`` computes, in Gluon.

There is room for two tiles of 64 latents. Triton's own pipeline asks for the next tile once it is done with one, or
needs room for a third; here the next one is on its way while one is used. Both products have a tile of latents from
shared memory as an operand: with few heads (FEW) as rows, since the matrix units take 64 of them at a time, and tokens
and features run down; with many heads these are the rows.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _page(table, at, last, PAGE: gl.constexpr):
    """Return the page of a tile."""
    return gl.load(table + at // PAGE, mask=at < last, other=0).to(gl.int64)


@gluon.jit
def _ask(tile, cells, place, count, WIDTH: gl.constexpr, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """Ask for WIDTH features of the ``count`` tokens of a tile; zeros stand for the others."""
    row, column = gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT)), gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    there = (row < count)[:, None] & (column < WIDTH)[None, :]
    async_copy.async_copy_global_to_shared(tile, cells + (row * place)[:, None] + column[None, :], mask=there)


@gluon.jit
def _fetch(
    latents, keys, cells, place, count, R: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr, BY_LATENT: gl.constexpr,
    BY_KEY: gl.constexpr,
):  # fmt: skip
    """Ask for a tile, whose first token is at ``cells``."""
    _ask(latents, cells, place, count, R, TILE, BY_LATENT)
    _ask(keys, cells + R, place, count, P, TILE, BY_KEY)
    async_copy.commit_group()


@gluon.jit
def _queries(
    rows, row, first, HEADS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    """Return ROWS heads of a token in shared memory, [ROWS, WIDTH]."""
    head = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    found = gl.load(rows + (head * row)[:, None] + column[None, :], mask=(head < HEADS)[:, None], other=0.0)
    return gl.allocate_shared_memory(rows.dtype.element_ty, [ROWS, WIDTH], SHARED, found)


@gluon.jit
def _scored(plain, rotated, latent, key, none, FEW: gl.constexpr):
    """Return scores on their way, [TILE, ROWS] with FEW and else [ROWS, TILE]."""
    if FEW:
        scores = warpgroup_mma(latent, plain.permute((1, 0)), none, use_acc=False, is_async=True)
        return warpgroup_mma(key, rotated.permute((1, 0)), scores, is_async=True)
    else:
        scores = warpgroup_mma(plain, latent.permute((1, 0)), none, use_acc=False, is_async=True)
        return warpgroup_mma(rotated, key.permute((1, 0)), scores, is_async=True)


@gluon.jit
def _mixed(weights, latent, mixed, FEW: gl.constexpr):
    """Add what a tile adds, to [R, ROWS] with FEW and else [ROWS, R]."""
    if FEW:
        mixed = warpgroup_mma(latent.permute((1, 0)), weights, mixed, is_async=True)
    else:
        mixed = warpgroup_mma(weights, latent, mixed, is_async=True)
    return warpgroup_mma_wait(0, deps=(mixed,))


@gluon.jit
def _leave(
    out, parts, bests, totals, best, total, mixed, sequence, split, splits, first, out_token, out_head,
    HEADS: gl.constexpr, ROWS: gl.constexpr, R: gl.constexpr, WHOLE: gl.constexpr, AXIS: gl.constexpr,
    SCORES: gl.constexpr, MIXED: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """Write what heads mix, or their parts; see ``triton_mla_kernels.leave``."""
    head = first + gl.arange(0, ROWS, gl.SliceLayout(AXIS, STORED))
    column = gl.arange(0, R, gl.SliceLayout(1 - AXIS, STORED))
    mask = gl.expand_dims(head < HEADS, AXIS) & gl.expand_dims(column < R, 1 - AXIS)
    if WHOLE:
        whole = gl.convert_layout(gl.maximum(total, 1.0e-30), gl.SliceLayout(AXIS, MIXED))
        found = gl.convert_layout((mixed / gl.expand_dims(whole, AXIS)).to(out.dtype.element_ty), STORED)
        rows = out + sequence.to(gl.int64) * out_token
        gl.store(rows + gl.expand_dims(head * out_head, AXIS) + gl.expand_dims(column, 1 - AXIS), found, mask=mask)
    else:
        index = (sequence.to(gl.int64) * splits + split) * HEADS
        place = first + gl.arange(0, ROWS, gl.SliceLayout(AXIS, SCORES))
        gl.store(bests + index + place, best, mask=place < HEADS)
        gl.store(totals + index + place, total, mask=place < HEADS)
        rows = parts + index * R + gl.expand_dims(head * R, AXIS)
        gl.store(rows + gl.expand_dims(column, 1 - AXIS), gl.convert_layout(mixed, STORED), mask=mask)


@gluon.jit
def _walk(
    plain, rotated, latents, keys, weights, cache, table, first, last, scale, page, place, ROWS: gl.constexpr,
    R: gl.constexpr, P: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr, FEW: gl.constexpr,
    AXIS: gl.constexpr, SCORES: gl.constexpr, MIXED: gl.constexpr, BY_LATENT: gl.constexpr, BY_KEY: gl.constexpr,
):  # fmt: skip
    """Return (best, total, mixed) of tokens ``first`` to ``last``, of which the first tile was asked for."""
    best = gl.full([ROWS], -1.0e30, gl.float32, gl.SliceLayout(AXIS, SCORES))
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(AXIS, SCORES))
    none = gl.full([TILE, ROWS] if FEW else [ROWS, TILE], 0.0, gl.float32, SCORES)
    mixed = gl.full([R, ROWS] if FEW else [ROWS, R], 0.0, gl.float32, MIXED)
    token = gl.arange(0, TILE, gl.SliceLayout(1 - AXIS, SCORES))
    number, turn = _page(table, first + TILE, last, PAGE), 0
    for at in range(first, last, TILE):
        async_copy.wait_group(0)
        fence_async_shared()
        # Past this every warp has its part of the tile, and none reads the one before any more.
        tl.debug_barrier()
        latent, key = latents.index(turn), keys.index(turn)
        scores = _scored(plain, rotated, latent, key, none, FEW)
        turn = 1 - turn
        if at + TILE < last:
            cells = cache + number * page + (at + TILE) % PAGE * place
            _fetch(latents.index(turn), keys.index(turn), cells, place, last - at - TILE, R, P, TILE, BY_LATENT, BY_KEY)
        number = _page(table, at + 2 * TILE, last, PAGE)
        seen = gl.expand_dims(at + token < last, 1 - AXIS)
        scores = gl.where(seen, warpgroup_mma_wait(0, deps=(scores,)) * scale, -1.0e30)
        highest = gl.maximum(best, gl.max(scores, AXIS))
        weight = gl.where(seen, gl.exp2(scores - gl.expand_dims(highest, AXIS)), 0.0)
        keep = gl.exp2(best - highest)
        best, total = highest, total * keep + gl.sum(weight, AXIS)
        weights.store(weight.to(cache.dtype.element_ty))
        fence_async_shared()
        mixed = mixed * gl.expand_dims(gl.convert_layout(keep, gl.SliceLayout(AXIS, MIXED)), AXIS)
        tl.debug_barrier()
        mixed = _mixed(weights, latent, mixed, FEW)
    return best, total, mixed


@gluon.jit
def mla_tiles_kernel(
    q, turned_q, cache, out, lengths, block_table, parts, bests, totals, splits, scale, q_token, q_head, turned_token,
    turned_head, page, place, table_row, out_token, out_head, HEADS: gl.constexpr, ROWS: gl.constexpr,
    R: gl.constexpr, P: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr, WHOLE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As ``mla_decode_kernel``, but for the order of the grid: programs that read the same latents follow one another.
    R and P are powers of two, tiles of 64 tokens do not cross pages, ROWS is 16 with 4 warps or 64 with 8.
    """
    FEW: gl.constexpr = ROWS == 16
    AXIS: gl.constexpr = 0 if FEW else 1
    WARPS: gl.constexpr = 4 if FEW else 8
    KIND: gl.constexpr = cache.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, ROWS if FEW else TILE // 2, 16])
    MIXED: gl.constexpr = SCORES if FEW else gl.NVMMADistributedLayout([3, 0], [4, 2], [16, R // 2, 16])
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [32, 1], [2, 2], [0, 1]) if FEW else MIXED
    BY_LATENT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS // 2, 2], [1, 0])
    BY_KEY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, sequence, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    length = gl.load(lengths + sequence)
    each = gl.maximum(gl.cdiv(gl.cdiv(length, TILE), splits), 1) * TILE
    first = split * each
    last = gl.minimum(first + each, length)
    table = block_table + sequence.to(gl.int64) * table_row
    latents = gl.allocate_shared_memory(KIND, [2, TILE, R], SHARED)
    keys = gl.allocate_shared_memory(KIND, [2, TILE, P], SHARED)
    weights = gl.allocate_shared_memory(
        KIND, [TILE, ROWS] if FEW else [ROWS, TILE], gl.NVMMASharedLayout(32 if FEW else 128, 16, 2)
    )
    cells = cache + _page(table, first, last, PAGE) * page + first % PAGE * place
    _fetch(latents.index(0), keys.index(0), cells, place, last - first, R, P, TILE, BY_LATENT, BY_KEY)
    q_rows, angles = q + sequence.to(gl.int64) * q_token, turned_q + sequence.to(gl.int64) * turned_token
    plain = _queries(q_rows, q_head, block * ROWS, HEADS, ROWS, R, BY_LATENT, SHARED)
    rotated = _queries(angles, turned_head, block * ROWS, HEADS, ROWS, P, BY_KEY, SHARED)
    best, total, mixed = _walk(
        plain, rotated, latents, keys, weights, cache, table, first, last, scale, page, place, ROWS, R, P, PAGE, TILE,
        FEW, AXIS, SCORES, MIXED, BY_LATENT, BY_KEY,
    )  # fmt: skip
    _leave(
        out, parts, bests, totals, best, total, mixed, sequence, split, splits, block * ROWS, out_token, out_head,
        HEADS, ROWS, R, WHOLE, AXIS, SCORES, MIXED, STORED,
    )  # fmt: skip
