# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Kernels that move keys and values: into pages, out of pages, and the fused way from a qkv projection into pages."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def stored(x, kind: tl.constexpr):
    """Return ``x`` in the cache's type; numbers beyond a narrow one's become its largest."""
    if kind == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0)
    elif kind == tl.float8e5:
        x = tl.clamp(x.to(tl.float32), -57344.0, 57344.0)
    return x.to(kind)


@triton.jit
def shrunk(x, scale, SCALED: tl.constexpr):
    """Return rows divided by their scales, rounded as torch does."""
    if SCALED:
        return tl.div_rn(x.to(tl.float32), scale[:, None] + tl.zeros_like(x).to(tl.float32))
    else:
        return x


@triton.jit
def write_kernel(
    k, v, k_cache, v_cache, slots, k_scale, v_scale, heads, k_row, k_head, v_row, v_head, kc_page, kc_head, kc_token,
    vc_page, vc_head, vc_token, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, parts of HEADS heads). A negative slot is not written. SCALED: each head has a scale."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    KIND: tl.constexpr = k_cache.dtype.element_ty
    if slot >= 0:
        head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        column = tl.arange(0, WIDTH)[None, :]
        mask = (head < heads) & (column < D)
        page, place = slot // PAGE, slot % PAGE
        keys = tl.load(k + token * k_row + head * k_head + column, mask=mask)
        values = tl.load(v + token * v_row + head * v_head + column, mask=mask)
        if SCALED:
            number = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
            keys = shrunk(keys, tl.load(k_scale + number, mask=number < heads, other=1.0), True)
            values = shrunk(values, tl.load(v_scale + number, mask=number < heads, other=1.0), True)
        tl.store(k_cache + page * kc_page + place * kc_token + head * kc_head + column, stored(keys, KIND), mask=mask)
        tl.store(v_cache + page * vc_page + place * vc_token + head * vc_head + column, stored(values, KIND), mask=mask)


@triton.jit
def gather_kernel(
    k_cache, v_cache, k, v, lengths, row_start, block_table, kc_page, kc_head, kc_token, vc_page, vc_head, vc_token,
    table_row, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of the longest sequence, sequences, heads). Copies kept tokens to contiguous rows [N, K, D]."""
    sequence = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + sequence)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if tl.program_id(0) * TILE < length:
        column = tl.arange(0, WIDTH)[None, :]
        here = token < length
        mask = here[:, None] & (column < D)
        page = tl.load(block_table + sequence * table_row + token // PAGE, mask=here, other=0).to(tl.int64)
        place = token % PAGE
        keys = tl.load(k_cache + (page * kc_page + place * kc_token)[:, None] + head * kc_head + column, mask=mask)
        values = tl.load(v_cache + (page * vc_page + place * vc_token)[:, None] + head * vc_head + column, mask=mask)
        row = (tl.load(row_start + sequence) + token).to(tl.int64) * tl.num_programs(2) + head
        tl.store(k + row[:, None] * D + column, keys, mask=mask)
        tl.store(v + row[:, None] * D + column, values, mask=mask)


@triton.jit
def _scaled(x, scale, factor, TYPE: tl.constexpr):
    """Return x * scale, rounded, times the factor, rounded: the roundings of the norm's reference."""
    return ((x * scale[:, None]).to(TYPE).to(tl.float32) * factor[None, :]).to(TYPE).to(tl.float32)


@triton.jit
def _prepare_heads(
    source, target, here, keep, low_factor, high_factor, rest_factor, eps, angles, scale_of, D: tl.constexpr,
    HALF: tl.constexpr, HALF_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate heads (``source`` [HEADS] pointers) and store them at ``target``, divided by ``scale_of``
    [HEADS] where SCALED. The factors are the norm's weights.

    A thread holds both members of its pairs, so that writing in place cannot race with reading.
    """
    TYPE: tl.constexpr = source.dtype.element_ty
    KIND: tl.constexpr = target.dtype.element_ty
    REST: tl.constexpr = D - 2 * HALF
    pair, other = tl.arange(0, HALF_WIDTH), 2 * HALF + tl.arange(0, REST_WIDTH)
    in_pair, in_rest = pair < HALF, other < D
    mask = here[:, None] & in_pair[None, :]
    low = tl.load(source[:, None] + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source[:, None] + HALF + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    if REST > 0:
        rest_mask = here[:, None] & in_rest[None, :]
        rest = tl.load(source[:, None] + other[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        scale = 1.0 / tl.sqrt(squares / D + eps)
        low = _scaled(low, scale, low_factor, TYPE)
        high = _scaled(high, scale, high_factor, TYPE)
        if REST > 0:
            rest = _scaled(rest, scale, rest_factor, TYPE)
    if ROPE:
        cos = tl.load(angles + pair, mask=in_pair, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(angles + HALF + pair, mask=in_pair, other=0.0).to(tl.float32)[None, :]
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
    mask = mask & keep
    tl.store(target[:, None] + pair[None, :], stored(shrunk(low.to(TYPE), scale_of, SCALED), KIND), mask=mask)
    tl.store(target[:, None] + HALF + pair[None, :], stored(shrunk(high.to(TYPE), scale_of, SCALED), KIND), mask=mask)
    if REST > 0:
        rest = shrunk(rest.to(TYPE), scale_of, SCALED)
        tl.store(target[:, None] + other[None, :], stored(rest, KIND), mask=rest_mask & keep)


@triton.jit
def _factors(weight, D: tl.constexpr, HALF: tl.constexpr, HALF_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr):
    """Return a norm's weights for the lower and the upper members of pairs, and for what is not rotated."""
    pair, other = tl.arange(0, HALF_WIDTH), 2 * HALF + tl.arange(0, REST_WIDTH)
    low = tl.load(weight + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    high = tl.load(weight + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    rest = tl.load(weight + other, mask=other < D, other=0.0).to(tl.float32)
    return low, high, rest


@triton.jit
def qk_norm_rope_write_kernel(
    qkv, q_weight, k_weight, eps, cos_sin, k_cache, v_cache, slots, k_scale, v_scale, qkv_row, angle_row, kc_page,
    kc_head, kc_token, vc_page, vc_head, vc_token, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, HALF: tl.constexpr, HALF_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, parts of HEADS heads: first those of queries, then of keys, then of values).

    Queries stay where they are; keys and values go into the page of the token's slot, or nowhere when it is negative.
    PDL: the launch is a programmatic dependent one (``jackfield_triton.launch``); only the norms' weights are read
    before the wait.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    Q_PARTS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    K_PARTS: tl.constexpr = (K_HEADS + HEADS - 1) // HEADS
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    low, high, rest = 1.0, 1.0, 1.0
    if NORM:
        norm = q_weight if part < Q_PARTS else k_weight
        low, high, rest = _factors(norm, D, HALF, HALF_WIDTH, REST_WIDTH)
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + token)
    page, place = slot // PAGE, slot % PAGE
    angles = cos_sin + token * angle_row
    source = qkv + token * qkv_row
    if part < Q_PARTS:
        head = part * HEADS + tl.arange(0, HEADS)
        _prepare_heads(
            source + head * D, source + head * D, head < Q_HEADS, True, low, high, rest, eps, angles, 1.0,
            D, HALF, HALF_WIDTH, REST_WIDTH, NORM, ROPE, False,
        )  # fmt: skip
    elif part < Q_PARTS + K_PARTS:
        head = (part - Q_PARTS) * HEADS + tl.arange(0, HEADS)
        scale_of = 1.0
        if SCALED:
            scale_of = tl.load(k_scale + head, mask=head < K_HEADS, other=1.0)
        _prepare_heads(
            source + (Q_HEADS + head) * D, k_cache + page * kc_page + place * kc_token + head.to(tl.int64) * kc_head,
            head < K_HEADS, slot >= 0, low, high, rest, eps, angles, scale_of,
            D, HALF, HALF_WIDTH, REST_WIDTH, NORM, ROPE, SCALED,
        )  # fmt: skip
    else:
        rows = (part - Q_PARTS - K_PARTS) * HEADS + tl.arange(0, HEADS)[:, None]
        column = tl.arange(0, WIDTH)[None, :]
        mask = (rows < K_HEADS) & (column < D) & (slot >= 0)
        values = tl.load(source + (Q_HEADS + K_HEADS + rows) * D + column, mask=mask)
        if SCALED:
            head = (part - Q_PARTS - K_PARTS) * HEADS + tl.arange(0, HEADS)
            values = shrunk(values, tl.load(v_scale + head, mask=head < K_HEADS, other=1.0), True)
        target = v_cache + page * vc_page + place * vc_token + rows.to(tl.int64) * vc_head
        tl.store(target + column, stored(values, target.dtype.element_ty), mask=mask)
