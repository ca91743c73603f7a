# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Latent attention of longer queries, over keys and values that were expanded from latents; heads share rotated keys.

Legend: K features without and P with rotation, V value size. A step's contexts lie in parts one after another; a row of
``tiles`` [N, 6] is one tile of queries in one part: its sequence, its first new token, where the sequence's tokens
begin in the part, the first and last (exclusive) of them, and flags: 1 for the first part that the tile sees, 2 for the
last. Between parts, mixed values and log-sum-exps (base 2) are kept in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIRST = tl.constexpr(1)
LAST = tl.constexpr(2)


@triton.jit
def _seen(
    plain, turned, k, v, rope, best, total, mixed, position, begin, first, stop, scale, k_token, v_token, rope_token,
    K: tl.constexpr, K_WIDTH: tl.constexpr, P: tl.constexpr, P_WIDTH: tl.constexpr, V: tl.constexpr,
    V_WIDTH: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return (best, total, mixed) with the keys from ``first`` to ``stop``; MASKED: some rows do not see all."""
    feature, angle, value = tl.arange(0, K_WIDTH), tl.arange(0, P_WIDTH), tl.arange(0, V_WIDTH)
    for at in range(first, stop, TILE):
        token = at + tl.arange(0, TILE)
        there = (token < stop)[:, None]
        place = (token - begin).to(tl.int64)[:, None]
        key = tl.load(k + place * k_token + feature[None, :], mask=there & (feature < K)[None, :], other=0.0)
        angled = tl.load(rope + place * rope_token + angle[None, :], mask=there & (angle < P)[None, :], other=0.0)
        other = tl.load(v + place * v_token + value[None, :], mask=there & (value < V)[None, :], other=0.0)
        scores = tl.dot(plain, tl.trans(key), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(angled), scores, input_precision="ieee") * scale
        if MASKED:
            seen = (token[None, :] <= position[:, None]) & (token < stop)[None, :]
            scores = tl.where(seen, scores, -1.0e30)
        highest = tl.maximum(best, tl.max(scores, 1))
        weight = tl.math.exp2(scores - highest[:, None])
        if MASKED:
            weight = tl.where(seen, weight, 0.0)
        keep = tl.math.exp2(best - highest)
        total = total * keep + tl.sum(weight, 1)
        mixed = tl.dot(weight.to(other.dtype), other, mixed * keep[:, None], input_precision="ieee")
        best = highest
    return best, total, mixed


@triton.jit
def mla_prefill_kernel(
    q, k, v, rope, out, mixes, sums, tiles, lengths, query_start, scale, q_token, q_head, k_token, k_head, v_token,
    v_head, rope_token, out_token, out_head, HEADS: tl.constexpr, K: tl.constexpr, K_WIDTH: tl.constexpr,
    P: tl.constexpr, P_WIDTH: tl.constexpr, V: tl.constexpr, V_WIDTH: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid: (heads, tiles). ``mixes`` [T, H, V] and ``sums`` [T, H] are what earlier parts left; ``scale`` is in units
    of log 2.
    """
    head, tile = tl.program_id(0), tiles + 6 * tl.program_id(1)
    sequence, first_row = tl.load(tile), tl.load(tile + 1)
    place, begin, end, flags = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5)
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    kept = tl.load(lengths + sequence) - count
    row = first_row + tl.arange(0, ROWS)
    valid = (row < count)[:, None]
    token = (start + row).to(tl.int64)[:, None]
    feature, angle, value = tl.arange(0, K_WIDTH), tl.arange(0, P_WIDTH), tl.arange(0, V_WIDTH)
    q_rows = q + token * q_token + head * q_head
    plain = tl.load(q_rows + feature[None, :], mask=valid & (feature < K)[None, :], other=0.0)
    turned = tl.load(q_rows + K + angle[None, :], mask=valid & (angle < P)[None, :], other=0.0)
    best = tl.full((ROWS,), -1.0e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, V_WIDTH), tl.float32)
    state = token * HEADS + head
    mask = valid & (value < V)[None, :]
    if (flags & FIRST) == 0:
        best = tl.load(sums + (start + row).to(tl.int64) * HEADS + head, mask=row < count, other=-1.0e30)
        total = tl.where(best > -1.0e29, 1.0, 0.0)
        mixed = tl.load(mixes + state * V + value[None, :], mask=mask, other=0.0)
    stop = tl.minimum(end, kept + tl.minimum(first_row + ROWS, count))
    whole = begin + tl.maximum(tl.minimum(stop, kept + first_row + 1) - begin, 0) // TILE * TILE
    keys = k + place.to(tl.int64) * k_token + head * k_head
    values = v + place.to(tl.int64) * v_token + head * v_head
    angles = rope + place.to(tl.int64) * rope_token
    best, total, mixed = _seen(
        plain, turned, keys, values, angles, best, total, mixed, kept + row, begin, begin, whole, scale, k_token,
        v_token, rope_token, K, K_WIDTH, P, P_WIDTH, V, V_WIDTH, TILE, False,
    )  # fmt: skip
    best, total, mixed = _seen(
        plain, turned, keys, values, angles, best, total, mixed, kept + row, begin, whole, stop, scale, k_token,
        v_token, rope_token, K, K_WIDTH, P, P_WIDTH, V, V_WIDTH, TILE, True,
    )  # fmt: skip
    found = mixed / tl.maximum(total, 1.0e-30)[:, None]
    if (flags & LAST) != 0:
        rows = out + token * out_token + head * out_head
        tl.store(rows + value[None, :], found.to(out.dtype.element_ty), mask=mask)
    else:
        left = tl.where(total > 0.0, best + tl.math.log2(tl.maximum(total, 1.0e-30)), -1.0e30)
        tl.store(sums + (start + row).to(tl.int64) * HEADS + head, left, mask=row < count)
        tl.store(mixes + state * V + value[None, :], found, mask=mask)
