# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""One more token of each sequence, for layers with states: a state is read once and written once.

``pages`` [sequences, 2], contiguous, are those before and after; a sequence whose first is negative begins with zeros,
and one whose second is negative leaves nothing behind. They may be the same page. Inputs and states are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def state_step_kernel(
    q, k, v, g, beta, added, state, out, pages, page, out_token, out_head, HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, K_WIDTH: tl.constexpr, TILE: tl.constexpr, DELTA: tl.constexpr,
    BY_KEY: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """S = exp(g) S + k u', o = S' q; u is v, or with DELTA what is new of it. Grid: (sequences, heads, tiles of V).

    q, k [sequences, heads, K], v, added [sequences, heads, V], beta [sequences, heads], g the same, or with BY_KEY
    [sequences, heads, K]; all contiguous. state [pages, heads, K, V].
    """
    sequence, head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row = sequence * HEADS + head
    key, column = tl.arange(0, K_WIDTH), tile * TILE + tl.arange(0, TILE)
    here = (key < K)[:, None] & (column < V)[None, :]
    old, new = tl.load(pages + 2 * sequence), tl.load(pages + 2 * sequence + 1)
    place = head * K * V + key[:, None] * V + column[None, :]
    s = tl.load(state + old * page + place, mask=here & (old >= 0), other=0.0)
    if BY_KEY:
        s = s * tl.exp(tl.load(g + row * K + key, mask=key < K, other=0.0))[:, None]
    else:
        s = s * tl.exp(tl.load(g + row))
    k_row = tl.load(k + row * K + key, mask=key < K, other=0.0)
    q_row = tl.load(q + row * K + key, mask=key < K, other=0.0)
    u_row = tl.load(v + row * V + column, mask=column < V, other=0.0)
    if DELTA:
        u_row = (u_row - tl.sum(s * k_row[:, None], 0)) * tl.load(beta + row)
    s = s + k_row[:, None] * u_row[None, :]
    o_row = tl.sum(s * q_row[:, None], 0)
    if ADDED:
        o_row = o_row + tl.load(added + row * V + column, mask=column < V, other=0.0)
    to = out + sequence * out_token + head * out_head + column
    tl.store(to, o_row.to(out.dtype.element_ty), mask=column < V)
    tl.store(state + new * page + place, s, mask=here & (new >= 0))


@triton.jit
def selective_step_kernel(
    a, x, dt, b, c, added, state, out, pages, page, out_token, CHANNELS: tl.constexpr, N: tl.constexpr,
    N_WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """h = exp(dt a) h + dt b x, y = c h. Grid: (sequences, tiles of C).

    a [C, N], x, dt, added [sequences, C], b, c [sequences, N]; all contiguous. state [pages, C, N].
    """
    sequence, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel, column = tile * TILE + tl.arange(0, TILE), tl.arange(0, N_WIDTH)
    real, there = channel < CHANNELS, column < N
    here = real[:, None] & there[None, :]
    old, new = tl.load(pages + 2 * sequence), tl.load(pages + 2 * sequence + 1)
    place = channel[:, None] * N + column[None, :]
    h = tl.load(state + old * page + place, mask=here & (old >= 0), other=0.0)
    step = tl.load(dt + sequence * CHANNELS + channel, mask=real, other=0.0)
    value = tl.load(x + sequence * CHANNELS + channel, mask=real, other=0.0)
    rate = tl.load(a + place, mask=here, other=0.0)
    into = tl.load(b + sequence * N + column, mask=there, other=0.0)
    out_of = tl.load(c + sequence * N + column, mask=there, other=0.0)
    h = tl.exp(step[:, None] * rate) * h + (step * value)[:, None] * into[None, :]
    y = tl.sum(h * out_of[None, :], 1) + tl.load(added + sequence * CHANNELS + channel, mask=real, other=0.0)
    tl.store(out + sequence * out_token + channel, y.to(out.dtype.element_ty), mask=real)
    tl.store(state + new * page + place, h, mask=here & (new >= 0))


@triton.jit
def conv_step_kernel(
    x, weight, bias, kept, out, pages, x_token, page, out_token, C: tl.constexpr, W: tl.constexpr,
    W_WIDTH: tl.constexpr, TILE: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """The convolution of each channel over its last W tokens. Grid: (sequences, tiles of C). kept [pages, C, W - 1]."""
    sequence, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel, place = tile * TILE + tl.arange(0, TILE), tl.arange(0, W_WIDTH)
    real = channel < C
    here = real[:, None] & (place < W - 1)[None, :]
    old, new = tl.load(pages + 2 * sequence), tl.load(pages + 2 * sequence + 1)
    rows = channel[:, None] * (W - 1) + place[None, :]
    seen = tl.load(kept + old * page + rows, mask=here & (old >= 0), other=0.0)
    factors = tl.load(weight + channel[:, None] * W + place[None, :], mask=here, other=0.0).to(tl.float32)
    token = tl.load(x + sequence * x_token + channel, mask=real, other=0.0)
    last = tl.load(weight + channel * W + W - 1, mask=real, other=0.0).to(tl.float32)
    total = tl.sum(seen.to(tl.float32) * factors, 1) + token.to(tl.float32) * last
    if BIAS:
        total = total + tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + sequence * out_token + channel, total.to(out.dtype.element_ty), mask=real)
    # The page may be the one that was read: all of it must have been.
    tl.debug_barrier()
    kind: tl.constexpr = kept.dtype.element_ty
    moved = here & (place > 0)[None, :] & (new >= 0)
    tl.store(kept + new * page + rows - 1, seen, mask=moved)
    tl.store(kept + new * page + channel * (W - 1) + W - 2, token.to(kind), mask=real & (new >= 0))


@triton.jit
def _begin_chunks(
    x, weight, bias, kept, out, old, new, page, x_token, out_token, count, channel, real, W: tl.constexpr,
    W_WIDTH: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Write the first W - 1 of ``count`` tokens, which see what was kept, and then keep the last of both."""
    place = tl.arange(0, W_WIDTH)
    total = tl.zeros((W_WIDTH, channel.shape[0]), tl.float32)
    rows = channel * (W - 1)
    for back in tl.static_range(W):
        token = place - back
        seen = _seen(x, kept + old * page, token, token < count, old, x_token, rows, channel, real, W, total.dtype)
        total += seen * tl.load(weight + channel * W + W - 1 - back, mask=real, other=0.0).to(tl.float32)[None, :]
    total = _activated(total, bias, channel, real, BIAS, SILU).to(out.dtype.element_ty)
    first = (place < W - 1) & (place < count)
    tl.store(out + place[:, None] * out_token + channel[None, :], total, mask=first[:, None] & real[None, :])
    last = count - (W - 1) + place
    kind: tl.constexpr = kept.dtype.element_ty
    behind = _seen(x, kept + old * page, last, place < W - 1, old, x_token, rows, channel, real, W, kind)
    # The page may be the one that was read: all of it must have been.
    tl.debug_barrier()
    here = (place < W - 1)[:, None] & real[None, :] & (new >= 0)
    tl.store(kept + new * page + rows[None, :] + place[:, None], behind, mask=here)


@triton.jit
def _seen(x, kept, token, there, old, x_token, rows, channel, real, W: tl.constexpr, kind: tl.constexpr):
    """Return channels of tokens: of new ones, or of the last W - 1 before them where ``token`` is negative."""
    here = there[:, None] & real[None, :]
    is_new = (token >= 0)[:, None]
    fresh = tl.load(x + token.to(tl.int64)[:, None] * x_token + channel[None, :], mask=here & is_new, other=0.0)
    place = rows[None, :] + (W - 1 + token)[:, None]
    still = tl.load(kept + place, mask=here & (is_new == 0) & (old >= 0), other=0.0)
    return tl.where(is_new, fresh.to(kind), still.to(kind))


@triton.jit
def _activated(total, bias, channel, real, BIAS: tl.constexpr, SILU: tl.constexpr):
    if BIAS:
        total += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@triton.jit
def conv_chunk_kernel(
    x, weight, bias, kept, out, pages, chunks, query_start, x_token, page, out_token, C: tl.constexpr, W: tl.constexpr,
    W_WIDTH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """The same over many tokens. Grid: (chunks, tiles of C). ``chunks`` [chunks, 2]: sequence, and first of its new
    tokens; each has ROWS tokens, at least W - 1.

    What is kept is read and written by the program of a sequence's first chunk alone, since both may be in one page.
    """
    chunk, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, first = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1)
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    row, channel = first + tl.arange(0, ROWS), tile * TILE + tl.arange(0, TILE)
    real, valid = channel < C, (row >= W - 1) & (row < count)
    x += start.to(tl.int64) * x_token
    out += start.to(tl.int64) * out_token
    here = valid[:, None] & real[None, :]
    total = tl.zeros((ROWS, TILE), tl.float32)
    for back in tl.static_range(W):
        values = tl.load(x + (row - back).to(tl.int64)[:, None] * x_token + channel[None, :], mask=here, other=0.0)
        factor = tl.load(weight + channel * W + W - 1 - back, mask=real, other=0.0).to(tl.float32)
        total += values.to(tl.float32) * factor[None, :]
    total = _activated(total, bias, channel, real, BIAS, SILU)
    to = out + row.to(tl.int64)[:, None] * out_token + channel[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=here)
    if first == 0:
        old, new = tl.load(pages + 2 * sequence), tl.load(pages + 2 * sequence + 1)
        _begin_chunks(
            x, weight, bias, kept, out, old, new, page, x_token, out_token, count, channel, real, W, W_WIDTH, BIAS, SILU
        )
