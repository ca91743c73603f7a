# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Attention of short queries (decode, verification of drafts) over pages, the keys split among programs.

One program holds all query heads that share a cache head, for all new tokens of a sequence: row = token * GROUP +
head. How many splits there are depends on the batch alone, never on lengths, so that a recorded graph stays right;
splits without keys leave at once. The split that arrives last puts the parts together and resets the counter. PDL: the
launch is a programmatic dependent one (``jackfield_triton.launch``); all that is read comes from the step, so a
program waits first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jackfield_attention.triton_tile_kernels import attend_tile, divided, lowest, sight, times, with_sink


@triton.jit
def _merge(
    parts, bests, totals, slot, active, out_row, sink, row, D: tl.constexpr, WIDTH: tl.constexpr,
    VALID: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Put one row's parts together and store it."""
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, WIDTH)
    index = (slot + split) * VALID + row
    here = split < active
    best = tl.load(bests + index, mask=here, other=-1.0e30, cache_modifier=".cg")
    total = tl.load(totals + index, mask=here, other=0.0, cache_modifier=".cg")
    mask = here[:, None] & (column < D)[None, :]
    part = tl.load(parts + index[:, None] * D + column[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    highest = tl.max(best, 0)
    weight = tl.math.exp2(best - highest)
    whole = tl.sum(total * weight, 0)
    mixed = tl.sum(part * weight[:, None], 0)
    if SINKS:
        highest, keep, whole = with_sink(highest, whole, sink)
        mixed = mixed * keep
    tl.store(out_row + column, divided(mixed, whole).to(out_row.dtype.element_ty), mask=column < D)


@triton.jit
def _merge_heads(
    parts, bests, totals, slot, active, out, sequence, kv_head, out_token, out_head, sinks,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Put the parts of one token's heads together, head by head."""
    for row in range(GROUP):
        head = kv_head * GROUP + row
        out_row = out + sequence.to(tl.int64) * out_token + head * out_head
        sink = 0.0
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32)
        _merge(parts, bests, totals, slot, active, out_row, sink, row, D, WIDTH, GROUP, SPLITS, SINKS)


@triton.jit
def _merge_rows(
    parts, bests, totals, slot, active, out_rows, sinks, head, valid, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, VALID: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Put the parts of all rows together, CHUNK splits at a time: one row after another would take as long as there
    are rows.
    """
    row, column, split = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, SPLITS)
    index = (slot + split)[:, None] * VALID + row[None, :]
    here = (split < active)[:, None] & (row < VALID)[None, :]
    best = tl.load(bests + index, mask=here, other=-1.0e30, cache_modifier=".cg")
    total = tl.load(totals + index, mask=here, other=0.0, cache_modifier=".cg")
    highest = tl.max(best, 0)
    whole = tl.sum(total * tl.math.exp2(best - highest[None, :]), 0)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    few = tl.arange(0, CHUNK)
    for first in range(0, active, CHUNK):
        at = (slot + first + few)[:, None] * VALID + row[None, :]
        real = (first + few < active)[:, None] & (row < VALID)[None, :]
        mask = real[:, :, None] & (column < D)[None, None, :]
        part = tl.load(parts + at[:, :, None] * D + column[None, None, :], mask=mask, other=0.0, cache_modifier=".cg")
        some = tl.load(bests + at, mask=real, other=-1.0e30, cache_modifier=".cg")
        mixed += tl.sum(part * tl.math.exp2(some - highest[None, :])[:, :, None], 0)
    _store_whole(mixed, highest, whole, out_rows, sinks, head, valid, D, WIDTH, SINKS)


@triton.jit
def _store_whole(
    mixed, best, total, out_rows, sinks, head, valid, D: tl.constexpr, WIDTH: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Store rows that one split saw whole."""
    column = tl.arange(0, WIDTH)
    if SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32)
        best, keep, total = with_sink(best, total, sink)
        mixed = mixed * keep[:, None]
    mask = valid[:, None] & (column < D)[None, :]
    tl.store(
        out_rows[:, None] + column[None, :],
        divided(mixed, total[:, None]).to(out_rows.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def _store_part(
    mixed, best, total, parts, bests, totals, slot, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    VALID: tl.constexpr,
):  # fmt: skip
    """Store what one split saw, not yet divided."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    index = slot * VALID + row
    tl.store(bests + index, best, mask=row < VALID)
    tl.store(totals + index, total, mask=row < VALID)
    mask = (row < VALID)[:, None] & (column < D)[None, :]
    tl.store(parts + index[:, None] * D + column[None, :], mixed, mask=mask)


@triton.jit
def _leave_part(
    mixed, best, total, parts, bests, totals, counters, sequence, kv_head, split, splits, active, out, out_rows,
    out_token, out_head, sinks, head, valid, GROUP: tl.constexpr, QUERY: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, VALID: tl.constexpr, MERGE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Store what one split saw; the one that arrives last puts the parts together."""
    CHUNK: tl.constexpr = 8192 // (ROWS * WIDTH) if ROWS * WIDTH < 8192 else 1
    pair = sequence * tl.num_programs(1) + kv_head
    _store_part(mixed, best, total, parts, bests, totals, pair * splits + split, D, WIDTH, ROWS, VALID)
    # All threads' parts must be stored before the one thread that counts releases them.
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + pair, 1, sem="acq_rel")
    if arrived == active - 1:
        if QUERY == 1:
            _merge_heads(
                parts, bests, totals, pair * splits, active, out, sequence, kv_head, out_token, out_head, sinks,
                GROUP, D, WIDTH, MERGE, SINKS,
            )  # fmt: skip
        else:
            _merge_rows(
                parts, bests, totals, pair * splits, active, out_rows, sinks, head, valid,
                D, WIDTH, ROWS, VALID, MERGE, CHUNK, SINKS,
            )  # fmt: skip
        tl.store(counters + pair, 0)


@triton.jit
def _see(
    q, k, v, table, begin, end, length, limit, mine, bits, scale, cap, k_page, k_token, v_page, v_token,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Return (mixed, best, total) of keys ``begin`` to ``end``."""
    best = tl.full((ROWS,), -1.0e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(begin, end, TILE):
        mixed, best, total = attend_tile(
            q, mixed, best, total, k, v, table, first, length, limit, mine, bits, scale, cap, k_page, k_token, v_page,
            v_token, D, WIDTH, PAGE, TILE, WINDOW, CAPPED, True, TREE,
        )  # fmt: skip
    return mixed, best, total


@triton.jit
def _place(query_start, sequence, QUERY: tl.constexpr):
    """Return the first new token of a sequence, and how many it has."""
    start, count = sequence, 1
    if QUERY != 1:
        start = tl.load(query_start + sequence)
        count = tl.load(query_start + sequence + 1) - start
    return start, count


@triton.jit
def decode_kernel(
    q, k, v, out, lengths, query_start, block_table, sinks, parts, bests, totals, counters, k_scale, v_scale,
    tree_base, tree_bits, tree_text, splits, scale, cap, q_token, q_head, k_page, k_head, k_token, v_page, v_head,
    v_token, out_token, out_head, table_row,
    GROUP: tl.constexpr, QUERY: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    MERGE: tl.constexpr, SCALED: tl.constexpr, TREE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences, cache heads, splits). QUERY bounds the new tokens of a sequence; MERGE bounds the splits. TREE:
    drafts branch, see TreeMask.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    VALID: tl.constexpr = GROUP * QUERY
    length = tl.load(lengths + sequence)
    start, count = _place(query_start, sequence, QUERY)
    begin = 0
    if WINDOW != 0:
        begin = lowest(tl.maximum(length - count, 0), WINDOW) // TILE * TILE
    each = tl.maximum(tl.cdiv(tl.cdiv(length - begin, TILE), splits), 1)
    active = tl.maximum(tl.cdiv(length - begin, each * TILE), 1)
    if MERGE == 1:
        active = 1
    if split < active:
        row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
        token, head = row // GROUP, kv_head * GROUP + row % GROUP
        valid = (row < VALID) & (token < count)
        q_rows = q + (start + token).to(tl.int64) * q_token + head * q_head
        query = tl.load(q_rows[:, None] + column[None, :], mask=valid[:, None] & (column < D)[None, :], other=0.0)
        first = begin + split * each * TILE
        limit, mine, bits = sight(
            length - count + token + 1, tree_base, tree_bits, tree_text, start + token, valid, TREE
        )  # fmt: skip
        scale = times(scale, k_scale + kv_head, SCALED)
        mixed, best, total = _see(
            query, k + kv_head.to(tl.int64) * k_head, v + kv_head.to(tl.int64) * v_head,
            block_table + sequence.to(tl.int64) * table_row, first, tl.minimum(first + each * TILE, length), length,
            limit, mine, bits, scale, cap, k_page, k_token, v_page, v_token,
            D, WIDTH, ROWS, PAGE, TILE, WINDOW, CAPPED, TREE,
        )  # fmt: skip
        mixed = times(mixed, v_scale + kv_head, SCALED)
        out_rows = out + (start + token).to(tl.int64) * out_token + head * out_head
        if active == 1:
            _store_whole(mixed, best, total, out_rows, sinks, head, valid, D, WIDTH, SINKS)
        else:
            _leave_part(
                mixed, best, total, parts, bests, totals, counters, sequence, kv_head, split, splits, active, out,
                out_rows, out_token, out_head, sinks, head, valid,
                GROUP, QUERY, D, WIDTH, ROWS, VALID, MERGE, SINKS,
            )  # fmt: skip
