# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Mamba-2 over many tokens, by the blocks of arXiv:2405.21060, section 6: three kernels over chunks of ROWS tokens.

Where there are many sequences, one kernel walks over each with its state and writes outputs on its way
(:func:`ssd_walk_kernel`): then no state between chunks is written or read, and tokens are read once.

A chunk's outputs are what its own tokens give each other (a product with decays between them, like attention) and what
the state before it gives. The states before all chunks come from one walk over each sequence, which keeps the state in
registers: it is never read back while it is made.

``chunks`` [chunks, 2]: sequence, and first of its new tokens; ``owners`` [sequences, 2]: sequence, and its first
chunk. ``steps`` and ``totals`` [chunks, heads, ROWS] float32: dt, and the sums of dt a up to each token in units of
log 2; behind a sequence's last token the former are 0 and the latter stay. ``between`` [chunks, heads, N, V]: the
states before chunks. Its type is that of all products: bfloat16, or float32 where decayed values could leave the range
of the inputs' type.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(base, place, valid, first, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Return rows at ``place``, and of them the TILE columns from ``first`` on; what is not there is zero."""
    column = first + tl.arange(0, TILE)
    at = base + place[:, None] + column[None, :]
    if SIZE % TILE == 0:
        return tl.load(at, mask=valid[:, None], other=0.0)
    else:
        return tl.load(at, mask=valid[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def ssd_decay_kernel(
    dt, bias, a, steps, totals, chunks, query_start, dt_token, low, high, HEADS: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Fill ``steps`` and ``totals``. Grid: (chunks, tiles of heads). dt [tokens, HEADS]; bias, a [HEADS]."""
    chunk, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, first = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    row, head = tl.arange(0, ROWS), tile * TILE + tl.arange(0, TILE)
    real = head < HEADS
    here = (first + row < count)[:, None] & real[None, :]
    place = (start + first + row).to(tl.int64) * dt_token
    value = tl.load(dt + place[:, None] + head[None, :], mask=here, other=0.0).to(tl.float32)
    value += tl.load(bias + head, mask=real, other=0.0).to(tl.float32)[None, :]
    # log(1 + u) loses small u; what 1 + u really became says how much.
    u = tl.exp(tl.minimum(value, 20.0))
    sum_ = 1.0 + u
    soft = tl.where(sum_ == 1.0, u, tl.log(sum_) * (u / tl.where(sum_ == 1.0, 1.0, sum_ - 1.0)))
    step = tl.minimum(tl.maximum(tl.where(value > 20.0, value, soft), low), high)
    step = tl.where(here, step, 0.0)
    rate = tl.load(a + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
    to = (chunk * HEADS + head[None, :]) * ROWS + row[:, None]
    tl.store(steps + to, step, mask=real[None, :])
    tl.store(totals + to, tl.cumsum(step * rate[None, :], 0), mask=real[None, :])


@triton.jit
def ssd_states_kernel(
    x, b, steps, totals, state, between, pages, owners, query_start, x_token, x_head, b_token, b_group, page,
    HEADS: tl.constexpr, REPEATS: tl.constexpr, N: tl.constexpr, V: tl.constexpr, N_TILES: tl.constexpr,
    N_TILE: tl.constexpr, V_TILE: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk over each sequence: fill ``between`` and leave the last state in its page.

    Grid: (tiles of N and V times heads, sequences), heads first: they share keys. x [tokens, HEADS, V], b [tokens,
    HEADS / REPEATS, N], state [pages, HEADS, N, V] float32.
    """
    head, tile = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    sequence = tl.load(owners + 2 * tl.program_id(1))
    chunk = tl.load(owners + 2 * tl.program_id(1) + 1).to(tl.int64)
    start = tl.load(query_start + sequence).to(tl.int64)
    count = tl.load(query_start + sequence + 1) - start.to(tl.int32)
    old, new = tl.load(pages + 2 * sequence.to(tl.int64)), tl.load(pages + 2 * sequence.to(tl.int64) + 1)
    n_first, v_first = tile % N_TILES * N_TILE, tile // N_TILES * V_TILE
    row, key, value = tl.arange(0, ROWS), n_first + tl.arange(0, N_TILE), v_first + tl.arange(0, V_TILE)
    here = (key < N)[:, None] & (value < V)[None, :]
    cell = key[:, None] * V + value[None, :]
    kind: tl.constexpr = between.dtype.element_ty
    s = tl.load(state + old * page + head * N * V + cell, mask=here & (old >= 0), other=0.0)
    x += start * x_token + head * x_head
    b += start * b_token + head // REPEATS * b_group
    for first in range(0, count, ROWS):
        at = chunk * HEADS + head
        tl.store(between + at * N * V + cell, s.to(kind), mask=here)
        last = tl.load(totals + at * ROWS + ROWS - 1)
        left = tl.exp2(last - tl.load(totals + at * ROWS + row)) * tl.load(steps + at * ROWS + row)
        token, valid = (first + row).to(tl.int64), first + row < count
        values = _tile(x, token * x_token, valid, v_first, V, V_TILE)
        keys = _tile(b, token * b_token, valid, n_first, N, N_TILE)
        added = (values.to(tl.float32) * left[:, None]).to(kind)
        s = tl.dot(tl.trans(keys.to(kind)), added, s * tl.exp2(last), input_precision=PRECISION)
        chunk += 1
    # The page may be the one that was read: all of it must have been.
    tl.debug_barrier()
    tl.store(state + new * page + head * N * V + cell, s, mask=here & (new >= 0))


@triton.jit
def _scores(
    b, c, b_place, c_place, valid, N: tl.constexpr, N_TILES: tl.constexpr, N_TILE: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Return [ROWS, ROWS] products of c and b: the same for all heads of a group."""
    scores = tl.zeros((ROWS, ROWS), tl.float32)
    for tile in tl.static_range(N_TILES):
        queries = _tile(c, c_place, valid, tile * N_TILE, N, N_TILE).to(kind)
        keys = _tile(b, b_place, valid, tile * N_TILE, N, N_TILE).to(kind)
        scores = tl.dot(queries, tl.trans(keys), scores, input_precision=PRECISION)
    return scores


@triton.jit
def _weights(scores, total, step, row):
    """Return what values of tokens are multiplied by for each token: scores, decayed since, times steps."""
    # Later tokens are taken out before the exponential: their decays would be more than 1, and may be infinite.
    since = tl.where(row[:, None] >= row[None, :], total[:, None] - total[None, :], float("-inf"))
    return scores * tl.exp2(since) * step[None, :]


@triton.jit
def _from_state(
    c, c_place, valid, state, v_first, N: tl.constexpr, V: tl.constexpr, N_TILES: tl.constexpr, N_TILE: tl.constexpr,
    V_TILE: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return [ROWS, V_TILE] products of c and a state [N, V] that has the type of products."""
    kind: tl.constexpr = state.dtype.element_ty
    mixed = tl.zeros((ROWS, V_TILE), tl.float32)
    for tile in tl.static_range(N_TILES):
        key = tile * N_TILE + tl.arange(0, N_TILE)
        queries = _tile(c, c_place, valid, tile * N_TILE, N, N_TILE).to(kind)
        part = _tile(state, key * V, key < N, v_first, V, V_TILE)
        mixed = tl.dot(queries, part, mixed, input_precision=PRECISION)
    return mixed


@triton.jit
def ssd_outputs_kernel(
    x, b, c, d, steps, totals, between, out, chunks, query_start, x_token, x_head, b_token, b_group, c_token, c_group,
    out_token, out_head, heads_each, HEADS: tl.constexpr, REPEATS: tl.constexpr, N: tl.constexpr, V: tl.constexpr,
    N_TILES: tl.constexpr, N_TILE: tl.constexpr, V_TILES: tl.constexpr, V_TILE: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the outputs of all chunks. Grid: (blocks of ``heads_each`` heads of a group, times tiles of V; chunks).

    c as b; d [HEADS]; the rest as above. Products of c and b are computed once for the heads of a program.
    """
    block, v_first = tl.program_id(0) // V_TILES, tl.program_id(0) % V_TILES * V_TILE
    chunk = tl.program_id(1).to(tl.int64)
    sequence, first = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    row = tl.arange(0, ROWS)
    token, valid = (start + first + row).to(tl.int64), first + row < count
    blocks = tl.cdiv(REPEATS, heads_each)
    group = block // blocks
    low = group * REPEATS + block % blocks * heads_each
    high = tl.minimum(low + heads_each, (group + 1) * REPEATS)
    kind: tl.constexpr = between.dtype.element_ty
    b += group * b_group
    c += group * c_group
    scores = _scores(b, c, token * b_token, token * c_token, valid, N, N_TILES, N_TILE, ROWS, PRECISION, kind)
    if N_TILES == 1:
        queries = _tile(c, token * c_token, valid, 0, N, N_TILE).to(kind)
    column = v_first + tl.arange(0, V_TILE)
    mask = valid[:, None] & (column < V)[None, :]
    for head in range(low, high):
        at = chunk * HEADS + head
        total = tl.load(totals + at * ROWS + row)
        if N_TILES == 1:
            part = _tile(between + at * N * V, tl.arange(0, N_TILE) * V, tl.arange(0, N_TILE) < N, v_first, V, V_TILE)
            mixed = tl.dot(queries, part, input_precision=PRECISION)
        else:
            mixed = _from_state(
                c, token * c_token, valid, between + at * N * V, v_first, N, V, N_TILES, N_TILE, V_TILE, ROWS, PRECISION
            )
        mixed = mixed * tl.exp2(total)[:, None]
        weights = _weights(scores, total, tl.load(steps + at * ROWS + row), row)
        values = _tile(x + head * x_head, token * x_token, valid, v_first, V, V_TILE)
        mixed = tl.dot(weights.to(kind), values.to(kind), mixed, input_precision=PRECISION)
        mixed += values.to(tl.float32) * tl.load(d + head).to(tl.float32)
        to = out + (token * out_token + head * out_head)[:, None] + column[None, :]
        tl.store(to, mixed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def ssd_scores_kernel(
    b, c, scores, chunks, query_start, b_token, b_group, c_token, c_group, N: tl.constexpr, N_TILES: tl.constexpr,
    N_TILE: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill ``scores`` [parts, groups, ROWS, ROWS], products of c and b in parts of chunks, which have CHUNK tokens.
    Grid: (groups, parts).
    """
    EACH: tl.constexpr = CHUNK // ROWS
    group, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    chunk = part // EACH
    sequence, first = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1) + part % EACH * ROWS
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    kind: tl.constexpr = scores.dtype.element_ty
    row = tl.arange(0, ROWS)
    token, valid = (start + first + row).to(tl.int64), first + row < count
    found = _scores(
        b + group * b_group, c + group * c_group, token * b_token, token * c_token, valid, N, N_TILES, N_TILE, ROWS,
        PRECISION, kind,
    )  # fmt: skip
    place = (part * tl.num_programs(0) + group) * (ROWS * ROWS)
    tl.store(scores + place + row[:, None] * ROWS + row[None, :], found.to(kind))


@triton.jit
def ssd_walk_kernel(
    x, b, c, d, steps, totals, scores, state, out, pages, owners, query_start, x_token, x_head, b_token, b_group,
    c_token, c_group, out_token, out_head, page, HEADS: tl.constexpr, REPEATS: tl.constexpr, N: tl.constexpr,
    V: tl.constexpr, N_TILE: tl.constexpr, V_TILE: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk over each sequence, ROWS tokens at a time: write all its outputs and leave the last state in its page.

    Grid: (HEADS times tiles of V, sequences), heads first: they share b, c and ``scores``, those of
    :func:`ssd_scores_kernel`. N_TILE is all of N. ``steps`` and ``totals`` are those of chunks of CHUNK tokens.
    """
    head, v_first = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS * V_TILE
    sequence = tl.load(owners + 2 * tl.program_id(1))
    chunk = tl.load(owners + 2 * tl.program_id(1) + 1).to(tl.int64)
    start = tl.load(query_start + sequence).to(tl.int64)
    count = tl.load(query_start + sequence + 1) - start.to(tl.int32)
    old, new = tl.load(pages + 2 * sequence.to(tl.int64)), tl.load(pages + 2 * sequence.to(tl.int64) + 1)
    row, key, value = tl.arange(0, ROWS), tl.arange(0, N_TILE), v_first + tl.arange(0, V_TILE)
    GROUPS: tl.constexpr = HEADS // REPEATS
    here = (key < N)[:, None] & (value < V)[None, :]
    cell = head * N * V + key[:, None] * V + value[None, :]
    kind: tl.constexpr = scores.dtype.element_ty
    s = tl.load(state + old * page + cell, mask=here & (old >= 0), other=0.0)
    through = tl.load(d + head).to(tl.float32)
    x += start * x_token + head * x_head
    b += start * b_token + head // REPEATS * b_group
    c += start * c_token + head // REPEATS * c_group
    out += start * out_token + head * out_head
    steps += (chunk * HEADS + head) * CHUNK
    totals += (chunk * HEADS + head) * CHUNK
    scores += (chunk * (CHUNK // ROWS) * GROUPS + head // REPEATS) * (ROWS * ROWS)
    square = row[:, None] * ROWS + row[None, :]
    for first in range(0, count, ROWS):
        at = first // CHUNK * (HEADS * CHUNK) + first % CHUNK
        before = tl.load(totals + at - 1, mask=first % CHUNK > 0, other=0.0)
        total, step = tl.load(totals + at + row) - before, tl.load(steps + at + row)
        last = tl.load(totals + at + ROWS - 1) - before
        valid = first + row < count
        values = _tile(x, row * x_token, valid, v_first, V, V_TILE)
        keys = _tile(b, row * b_token, valid, 0, N, N_TILE).to(kind)
        queries = _tile(c, row * c_token, valid, 0, N, N_TILE).to(kind)
        mixed = tl.dot(queries, s.to(kind), input_precision=PRECISION) * tl.exp2(total)[:, None]
        weights = _weights(tl.load(scores + square).to(tl.float32), total, step, row)
        mixed = tl.dot(weights.to(kind), values.to(kind), mixed, input_precision=PRECISION)
        mixed += values.to(tl.float32) * through
        to = out + (row * out_token)[:, None] + value[None, :]
        tl.store(to, mixed.to(out.dtype.element_ty), mask=valid[:, None] & (value < V)[None, :])
        added = (values.to(tl.float32) * (tl.exp2(last - total) * step)[:, None]).to(kind)
        s = tl.dot(tl.trans(keys), added, s * tl.exp2(last), input_precision=PRECISION)
        scores, x, out = scores + GROUPS * ROWS * ROWS, x + ROWS * x_token, out + ROWS * out_token
        b, c = b + ROWS * b_token, c + ROWS * c_token
    # The page may be the one that was read: all of it must have been.
    tl.debug_barrier()
    tl.store(state + new * page + cell, s, mask=here & (new >= 0))
