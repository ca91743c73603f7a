# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Pieces of attention kernels: finding keys in pages, one tile of the online softmax (arXiv:2205.14135), sinks.

Scores are kept in units of log 2. Running maxima start at a finite floor, so that a row that sees nothing of a tile
gives weights of exactly zero and never the difference of two infinities.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate(table, first, stop, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Return (page, place in the page) of keys ``first`` to ``first + TILE``; keys from ``stop`` on are on page 0.

    Where a tile lies in one page, the page is a scalar: one lookup instead of one for each key.
    """
    if PAGE % TILE == 0:
        page = tl.load(table + first // PAGE).to(tl.int64)
        place = first % PAGE + tl.arange(0, TILE)
    else:
        key = first + tl.arange(0, TILE)
        page = tl.load(table + key // PAGE, mask=key < stop, other=0).to(tl.int64)
        place = key % PAGE
    return page, place


@triton.jit
def load_tile(base, offsets, keys, stop, D: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Return [TILE, WIDTH] of a plane; what is past ``stop`` or past D is zero, whatever the cache holds there."""
    column = tl.arange(0, WIDTH)
    place = base + offsets[:, None] + column[None, :]
    if MASKED:
        return tl.load(place, mask=(keys < stop)[:, None] & (column < D)[None, :], other=0.0)
    elif D != WIDTH:
        return tl.load(place, mask=(column < D)[None, :], other=0.0)
    else:
        return tl.load(place)


@triton.jit
def capped(scores, cap):
    """Return cap * tanh(scores) by way of an exponential that saturates on both sides."""
    return cap * (1.0 - 2.0 / (tl.exp(2.0 * scores) + 1.0))


@triton.jit
def lowest(position, WINDOW: tl.constexpr):
    """Return the first key that a token sees: of a sliding window of WINDOW tokens or, where that is negative, of
    windows of so many tokens that lie one behind the other.
    """
    if WINDOW > 0:
        return tl.maximum(position - WINDOW + 1, 0)
    else:
        return position // -WINDOW * -WINDOW


@triton.jit
def sight(limit, tree_base, tree_bits, tree_text, place, valid, TREE: tl.constexpr):
    """Return what rows see: below which key everything, their positions, and which keys from there on, as bits."""
    mine, bits = limit - 1, limit
    if TREE:
        limit = tl.load(tree_base + place, mask=valid, other=0)
        mine = tl.load(tree_text + place, mask=valid, other=0)
        bits = tl.load(tree_bits + place, mask=valid, other=0)
    return limit, mine, bits


@triton.jit
def on_branch(key, limit, bits):
    """Return [ROWS, TILE] which keys from ``limit`` on are a row's ancestors: key ``limit + i`` where bit i is set."""
    shift = key[None, :] - limit[:, None]
    bit = bits[:, None] >> tl.minimum(tl.maximum(shift, 0), 62).to(tl.int64)
    return (shift >= 0) & (shift < 63) & ((bit & 1) != 0)


@triton.jit
def attend_tile(
    q, mixed, best, total, k, v, table, first, stop, limit, mine, bits, scale, cap, k_page, k_token, v_page, v_token,
    D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, MASKED: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Fold keys ``first`` to ``first + TILE`` into (mixed, best, total).

    A row sees keys below ``limit`` (TREE: and its ancestors among the others, which ``bits`` tell), and with a window
    (WINDOW is not 0) only those from :func:`lowest` on of its position ``mine``.
    """
    key = first + tl.arange(0, TILE)
    page, place = locate(table, first, stop, PAGE, TILE)
    # Narrow caches are widened here; the products are in the queries' type.
    keys = load_tile(k, page * k_page + place * k_token, key, stop, D, WIDTH, MASKED).to(q.dtype)
    scores = tl.dot(q, tl.trans(keys), input_precision="tf32x3") * scale
    if CAPPED:
        scores = capped(scores, cap)
    if MASKED:
        seen = key[None, :] < limit[:, None]
        if TREE:
            seen = seen | on_branch(key, limit, bits)
        if WINDOW != 0:
            seen = seen & (key[None, :] >= lowest(mine, WINDOW)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    weights = tl.math.exp2(scores - new_best[:, None])
    keep = tl.math.exp2(best - new_best)
    total = total * keep + tl.sum(weights, 1)
    mixed = mixed * keep[:, None]
    values = load_tile(v, page * v_page + place * v_token, key, stop, D, WIDTH, MASKED).to(q.dtype)
    if MASKED and WINDOW != 0:
        # In front of all rows' windows pages may be somebody else's, and hold what no weight of zero takes away.
        values = tl.where((tl.max(seen.to(tl.int32), 0) > 0)[:, None], values, 0.0)
    mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision="tf32x3")
    return mixed, new_best, total


@triton.jit
def with_sink(best, total, sink):
    """Return (best, factor on what was mixed, total) after a logit that has a weight and no value."""
    logit = sink * 1.4426950408889634
    new_best = tl.maximum(best, logit)
    keep = tl.math.exp2(best - new_best)
    return new_best, keep, total * keep + tl.math.exp2(logit - new_best)


@triton.jit
def times(x, factor, SCALED: tl.constexpr):
    """Return ``x``, times the number that ``factor`` points to where SCALED: keys and values are kept divided by a
    scale for each head.
    """
    if SCALED:
        return x * tl.load(factor)
    else:
        return x


@triton.jit
def divided(mixed, total):
    """Return mixed / total; zero where nothing was seen."""
    return mixed / tl.where(total > 0.0, total, 1.0)
