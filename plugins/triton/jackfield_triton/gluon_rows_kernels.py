# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Products of many rows with one matrix or with those of experts, on capability 9.0, in Gluon.

A program has three groups of warps. One brings tiles of rows and of weight into the next free place of a ring; two
multiply 64 rows each, by themselves: while one writes what it has finished, the other has the matrix units to itself.
Programs stay and take one tile of results after another, so that tiles of the next are on their way before the last
one is written.

Legend: X matrices; O ``outputs``, I ``inputs``; B ``blocks`` of BLOCK rows, which share a matrix; P ``pairs`` of a row
and a matrix. ``order`` [B, BLOCK] has the pairs of each block, P where there is none, and ``owners`` [B] their
matrices, -1 where a block is empty, which are the last ones.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(64)
"""Rows of a group of warps."""
GROUPS = gl.constexpr(2)
COLUMNS = gl.constexpr(256)
"""Sums of a row: of results, or half of them of gates and half of what they are multiplied with."""
DEPTH = gl.constexpr(64)


@gluon.jit
def _place(number, blocks, parts, SWIZZLE: gl.constexpr):
    """Return (block, part of the outputs) of a tile: SWIZZLE blocks follow one another, then the next part."""
    begin = number // (SWIZZLE * parts) * SWIZZLE
    together = gl.minimum(blocks - begin, SWIZZLE)
    within = number % (SWIZZLE * parts)
    return begin + within % together, within // together


@gluon.jit
def _owner(owners, block, OWNED: gl.constexpr):
    """Return the matrix of a block, -1 for none."""
    if OWNED:
        return gl.load(owners + block)
    else:
        return block * 0


@gluon.jit
def _chosen_rows(x, order, first, pairs, x_row, CHOSEN: gl.constexpr, LAYOUT: gl.constexpr):
    """Return pointers to the first DEPTH inputs of the rows of ROWS pairs; of some row where there is no pair."""
    pair = gl.load(order + first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)))
    row = gl.minimum(pair // CHOSEN, pairs // CHOSEN - 1).to(gl.int64)
    return x + (row * x_row)[:, None] + gl.arange(0, DEPTH, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _bring(
    x, weight, work, ring, x_row, CHOSEN: gl.constexpr, GATHER: gl.constexpr, GATED: gl.constexpr,
    OWNED: gl.constexpr, STAGES: gl.constexpr, SWIZZLE: gl.constexpr,
):  # fmt: skip
    """Ask for tiles, in their order, wherever there is room."""
    order, owners, pairs, blocks, parts, steps = work
    x_tiles, weight_tiles, ready, free = ring
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    WIDTH: gl.constexpr = COLUMNS // 2 if GATED else COLUMNS
    BYTES: gl.constexpr = (COLUMNS if GATHER else COLUMNS + GROUPS * ROWS) * DEPTH * 2
    count = 0
    for number in range(gl.program_id(0), blocks * parts, gl.num_programs(0)):
        block, part = _place(number, blocks, parts, SWIZZLE)
        owner = _owner(owners, block, OWNED)
        if owner >= 0:
            first = block * (GROUPS * ROWS)
            if GATHER:
                upper = _chosen_rows(x, order, first, pairs, x_row, CHOSEN, LAYOUT)
                lower = _chosen_rows(x, order, first + ROWS, pairs, x_row, CHOSEN, LAYOUT)
            if GATED:
                owner *= 2
            for step in range(steps):
                stage = count % STAGES
                # The first round finds all places free: a phase that has not begun counts as the one before it.
                mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
                here, depth = ready.index(stage), step * DEPTH
                mbarrier.expect(here, BYTES)
                tma.async_copy_global_to_shared(weight, [owner, part * WIDTH, depth], here, weight_tiles.index(stage))
                if GATHER:
                    async_copy.async_copy_global_to_shared(x_tiles.index(stage * GROUPS), upper + depth)
                    async_copy.async_copy_global_to_shared(x_tiles.index(stage * GROUPS + 1), lower + depth)
                    async_copy.mbarrier_arrive(here, increment_count=False)
                else:
                    tma.async_copy_global_to_shared(x, [first, depth], here, x_tiles.index(stage * GROUPS))
                    tma.async_copy_global_to_shared(x, [first + ROWS, depth], here, x_tiles.index(stage * GROUPS + 1))
                count += 1


@gluon.jit
def _activated(gate, ACTIVATION: gl.constexpr):
    """Return silu or tanh gelu, both by way of a sigmoid; its reciprocal is off by a millionth at most."""
    if ACTIVATION == "silu":
        inner = gate * -1.4426950408889634
    else:
        gl.static_assert(ACTIVATION == "gelu_tanh")
        inner = (gate + 0.044715 * gate * gate * gate) * -2.302208198144325
    divisor = 1.0 + gl.exp2(inner)
    return gate * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [divisor], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _leave(out, row, column, values, staging):
    """Write a tile by the copy engine, once it has read the one before."""
    tma.store_wait(0)
    tl.debug_barrier()
    staging.store(values.to(staging.dtype))
    fence_async_shared()
    tl.debug_barrier()
    tma.async_copy_shared_to_global(out, [row, column], staging)


@gluon.jit
def _summed(
    ring, count, steps, GROUP: gl.constexpr, GATHER: gl.constexpr, STAGES: gl.constexpr, SUMS: gl.constexpr
):  # fmt: skip
    """Return the sums of a tile, whose first piece is number ``count``. A piece is free once the next one is asked for:
    the matrix units are never without work.
    """
    x_tiles, weight_tiles, ready, free = ring
    total = gl.zeros([ROWS, COLUMNS], gl.float32, SUMS)
    for step in range(steps):
        stage = (count + step) % STAGES
        mbarrier.wait(ready.index(stage), (count + step) // STAGES & 1)
        if GATHER:
            fence_async_shared()  # threads wrote these rows, and the matrix units read them
        tile = weight_tiles.index(stage).reshape((COLUMNS, DEPTH)).permute((1, 0))
        total = warpgroup_mma(x_tiles.index(stage * GROUPS + GROUP), tile, total, is_async=True)
        total = warpgroup_mma_wait(1, deps=(total,))
        mbarrier.arrive(free.index((count + step + STAGES - 1) % STAGES), pred=step > 0)
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(free.index((count + steps - 1) % STAGES))
    return total


@gluon.jit
def _multiply(
    out, factors, work, ring, staging, GROUP: gl.constexpr, GATHER: gl.constexpr, GATED: gl.constexpr,
    OWNED: gl.constexpr, WEIGH: gl.constexpr, ACTIVATION: gl.constexpr, STAGES: gl.constexpr, SWIZZLE: gl.constexpr,
):  # fmt: skip
    """Multiply and write the rows of one group of warps."""
    order, owners, pairs, blocks, parts, steps = work
    _, _, ready, free = ring
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    HALF: gl.constexpr = COLUMNS // 2
    count = 0
    for number in range(gl.program_id(0), blocks * parts, gl.num_programs(0)):
        block, part = _place(number, blocks, parts, SWIZZLE)
        if _owner(owners, block, OWNED) >= 0:
            first = block * (GROUPS * ROWS) + GROUP * ROWS
            used = first < pairs
            if OWNED:
                used = gl.load(order + first) < pairs
            if used:
                total = _summed(ring, count, steps, GROUP, GATHER, STAGES, SUMS)
                if WEIGH:
                    pair = gl.load(order + first + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS)))
                    total *= gl.load(factors + pair, mask=pair < pairs, other=0.0)[:, None]
                left, right = gl.split(gl.permute(gl.reshape(total, [ROWS, 2, HALF]), (0, 2, 1)))
                if GATED:
                    _leave(out, first, part * HALF, _activated(left, ACTIVATION) * right, staging)
                else:
                    _leave(out, first, part * COLUMNS, left, staging)
                    _leave(out, first, part * COLUMNS + HALF, right, staging)
            else:
                for step in range(count, count + steps):
                    mbarrier.wait(ready.index(step % STAGES), step // STAGES & 1)
                    mbarrier.arrive(free.index(step % STAGES))
            count += steps
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["pairs", "blocks"])
def rows_kernel(
    x, weight, out, factors, order, owners, pairs, blocks, parts, steps, x_row, CHOSEN: gl.constexpr,
    GATHER: gl.constexpr, GATED: gl.constexpr, OWNED: gl.constexpr, WEIGH: gl.constexpr, ACTIVATION: gl.constexpr,
    STAGES: gl.constexpr, SWIZZLE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply each block's rows with its matrix; the grid is what the device holds, in one dimension.

    ``weight`` describes [X, O, I] with tiles of 1 x 256 x 64, or [2X, O, I] with tiles of 2 x 128 x 64 where gates
    (the even ones) are GATED by an activation; ``out`` [B * BLOCK, O] in tiles of 64 x 128, and rows without a pair
    are not defined. GATHER: ``x`` is a pointer to [P / CHOSEN, I] in rows ``x_row`` apart, I a multiple of 64, and a
    pair's row is that of its number / CHOSEN; else ``x`` describes rows in the order of ``out``, in tiles of 64 x 64.
    OWNED: blocks have owners; else all have the one matrix, and P is the number of rows. WEIGH: results are multiplied
    by ``factors`` [P], float32. ``parts`` tiles along O and ``steps`` along I.
    """
    KIND: gl.constexpr = out.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SPLIT: gl.constexpr = 2 if GATED else 1
    x_tiles = gl.allocate_shared_memory(KIND, [STAGES * GROUPS, ROWS, DEPTH], TILE)
    weight_tiles = gl.allocate_shared_memory(
        KIND, [STAGES, SPLIT, COLUMNS // SPLIT, DEPTH], gl.NVMMASharedLayout(128, 16, 3)
    )
    staging = gl.allocate_shared_memory(KIND, [GROUPS, ROWS, COLUMNS // 2], TILE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Each of 128 threads says when its rows are there, and one for what the copy engine brings.
        mbarrier.init(ready.index(stage), count=129 if GATHER else 1)
        mbarrier.init(free.index(stage), count=GROUPS)
    fence_async_shared()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    work = (order, owners, pairs, blocks, parts, steps)
    ring = (x_tiles, weight_tiles, ready, free)
    gl.warp_specialize(
        [
            (_multiply, (out, factors, work, ring, staging.index(0), 0, GATHER, GATED, OWNED, WEIGH, ACTIVATION, STAGES,
                         SWIZZLE)),
            (_multiply, (out, factors, work, ring, staging.index(1), 1, GATHER, GATED, OWNED, WEIGH, ACTIVATION, STAGES,
                         SWIZZLE)),
            (_bring, (x, weight, work, ring, x_row, CHOSEN, GATHER, GATED, OWNED, STAGES, SWIZZLE)),
        ],
        [4, 4 if GATHER else 1],
        [216, 72] if GATHER else [232, 40],
    )  # fmt: skip
