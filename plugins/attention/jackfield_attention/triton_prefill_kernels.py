# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Attention of long queries over pages: one program per tile of query rows and cache head.

A row is one token and one of the query heads that share the cache head: row = token * GROUP + head. So a tile of keys
serves all of them, and short chunks still fill a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jackfield_attention.triton_tile_kernels import attend_tile, divided, lowest, sight, times, with_sink


@triton.jit
def _see_range(
    q, mixed, best, total, k, v, table, begin, end, stop, limit, mine, bits, scale, cap, k_page, k_token, v_page,
    v_token, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, MASKED: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Fold the tiles from ``begin`` to ``end`` into (mixed, best, total)."""
    for first in range(begin, end, TILE):
        mixed, best, total = attend_tile(
            q, mixed, best, total, k, v, table, first, stop, limit, mine, bits, scale, cap, k_page, k_token, v_page,
            v_token, D, WIDTH, PAGE, TILE, WINDOW, CAPPED, MASKED, TREE,
        )  # fmt: skip
    return mixed, best, total


@triton.jit
def _see_all(
    q, k, v, table, known, low, high, stop, limit, mine, bits, scale, cap, k_page, k_token, v_page, v_token,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Return (mixed, best, total) of rows at positions ``low`` to ``high`` that all see keys below ``known``, but for
    windows, and none from ``stop`` on.

    Tiles that every row sees whole go without masks; those cut by a window's edge come before, the diagonal after.
    """
    best = tl.full((ROWS,), -1.0e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    diagonal = known // TILE * TILE
    whole = 0
    if WINDOW != 0:
        whole = tl.minimum(tl.cdiv(lowest(high, WINDOW), TILE) * TILE, diagonal)
        edge = tl.minimum(lowest(low, WINDOW) // TILE * TILE, whole)
        mixed, best, total = _see_range(
            q, mixed, best, total, k, v, table, edge, whole, stop, limit, mine, bits, scale, cap, k_page, k_token,
            v_page, v_token, D, WIDTH, PAGE, TILE, WINDOW, CAPPED, True, TREE,
        )  # fmt: skip
    mixed, best, total = _see_range(
        q, mixed, best, total, k, v, table, whole, diagonal, stop, limit, mine, bits, scale, cap, k_page, k_token,
        v_page, v_token, D, WIDTH, PAGE, TILE, WINDOW, CAPPED, False, TREE,
    )  # fmt: skip
    return _see_range(
        q, mixed, best, total, k, v, table, diagonal, stop, stop, limit, mine, bits, scale, cap, k_page, k_token,
        v_page, v_token, D, WIDTH, PAGE, TILE, WINDOW, CAPPED, True, TREE,
    )  # fmt: skip


@triton.jit
def prefill_kernel(
    q, k, v, out, lengths, query_start, block_table, tiles, sinks, k_scale, v_scale, tree_base, tree_bits,
    tree_text, scale, cap, q_token, q_head, k_page, k_head, k_token, v_page, v_head, v_token, out_token, out_head,
    table_row, GROUP: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr,
    TREE: tl.constexpr,
):  # fmt: skip
    """Grid: (cache heads, tiles); ``tiles`` [N, 2] holds each tile's sequence and its first new token. SCALED and TREE:
    as in the decode kernel.
    """
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    first_token = tl.load(tiles + 2 * tile + 1)
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    length = tl.load(lengths + sequence)
    TOKENS: tl.constexpr = ROWS // GROUP
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token, head = first_token + row // GROUP, kv_head * GROUP + row % GROUP
    valid = (row < TOKENS * GROUP) & (token < count)
    mask = valid[:, None] & (column < D)[None, :]
    place = (start + token).to(tl.int64)
    query = tl.load(q + (place * q_token + head * q_head)[:, None] + column[None, :], mask=mask, other=0.0)
    base = length - count + first_token
    stop = tl.minimum(base + TOKENS, length)
    known, low, high = base + 1, base, stop - 1
    limit, mine, bits = sight(length - count + token + 1, tree_base, tree_bits, tree_text, place, valid, TREE)
    if TREE:
        known = tl.min(tl.where(valid, limit, base + 1), 0)
        low = tl.min(tl.where(valid, mine, high), 0)
        high = tl.max(mine, 0)
    scale = times(scale, k_scale + kv_head, SCALED)
    mixed, best, total = _see_all(
        query, k + kv_head.to(tl.int64) * k_head, v + kv_head.to(tl.int64) * v_head,
        block_table + sequence.to(tl.int64) * table_row, known, low, high, stop, limit, mine, bits, scale, cap, k_page,
        k_token, v_page, v_token, D, WIDTH, ROWS, PAGE, TILE, WINDOW, CAPPED, TREE,
    )  # fmt: skip
    mixed = times(mixed, v_scale + kv_head, SCALED)
    if SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32)
        best, keep, total = with_sink(best, total, sink)
        mixed = mixed * keep[:, None]
    result = divided(mixed, total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (place * out_token + head * out_head)[:, None] + column[None, :], result, mask=mask)
