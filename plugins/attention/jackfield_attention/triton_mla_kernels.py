# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Latent attention of single new tokens: one key for all heads, whose first R features are the values too.

A program holds some heads of one sequence and a part of its keys, so that each latent is read once for all of them.
How many splits there are depends on the batch alone, so that a recorded graph stays right. PDL: the launch is a
programmatic dependent one (``jackfield_triton.launch``); all that is read comes from the step, so a program waits
first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jackfield_attention.triton_cache_kernels import stored


@triton.jit
def mla_write_kernel(
    latent, rope, cache, slots, latent_token, rope_token, page, place, R: tl.constexpr, P: tl.constexpr,
    R_WIDTH: tl.constexpr, P_WIDTH: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the latent and the rotated key of one new token. Grid: (tokens,). A negative slot is not written."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        row = cache + slot // PAGE * page + slot % PAGE * place
        kind: tl.constexpr = cache.dtype.element_ty
        column = tl.arange(0, R_WIDTH)
        value = tl.load(latent + token * latent_token + column, mask=column < R, other=0.0)
        turned = tl.arange(0, P_WIDTH)
        key = tl.load(rope + token * rope_token + turned, mask=turned < P, other=0.0)
        tl.store(row + column, stored(value, kind), mask=column < R)
        tl.store(row + R + turned, stored(key, kind), mask=turned < P)


@triton.jit
def folded(plain, rotated, latent, key, there, scale, best, total, mixed):
    """Return (best, total, mixed) with a tile of latents and rotated keys, of which some are not ``there``."""
    latent, key = latent.to(plain.dtype), key.to(plain.dtype)
    scores = tl.dot(plain, tl.trans(latent), input_precision="ieee")
    scores += tl.dot(rotated, tl.trans(key), input_precision="ieee")
    scores = tl.where(there[None, :], scores * scale, -1.0e30)
    highest = tl.maximum(best, tl.max(scores, 1))
    weight = tl.where(there[None, :], tl.math.exp2(scores - highest[:, None]), 0.0)
    keep = tl.math.exp2(best - highest)
    total = total * keep + tl.sum(weight, 1)
    mixed = mixed * keep[:, None]
    mixed += tl.dot(weight.to(latent.dtype), latent, input_precision="ieee")
    return highest, total, mixed


@triton.jit
def leave(
    out, parts, bests, totals, best, total, mixed, row, split, splits, head, column, out_row, out_head,
    HEADS: tl.constexpr, R: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Write what a row mixes, or with other splits beside this one its part, from which they are put together."""
    mask = (head < HEADS)[:, None] & (column < R)[None, :]
    if WHOLE:
        found = mixed / tl.maximum(total, 1.0e-30)[:, None]
        rows = out + row.to(tl.int64) * out_row + head[:, None] * out_head
        tl.store(rows + column[None, :], found.to(out.dtype.element_ty), mask=mask)
    else:
        index = (row.to(tl.int64) * splits + split) * HEADS + head
        tl.store(bests + index, best, mask=head < HEADS)
        tl.store(totals + index, total, mask=head < HEADS)
        tl.store(parts + index[:, None] * R + column[None, :], mixed, mask=mask)


@triton.jit
def _pages(table, at, last, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Return the page of a tile's tokens, which is one where tiles do not cross pages, or else of each, [TILE]."""
    if PAGE % TILE == 0:
        return tl.load(table + at // PAGE, mask=at < last, other=0).to(tl.int64)
    else:
        token = at + tl.arange(0, TILE)
        return tl.load(table + token // PAGE, mask=token < last, other=0).to(tl.int64)


@triton.jit
def _places(number, at, page, place, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Return where a tile's tokens lie from the start of the cache, [TILE]."""
    if PAGE % TILE == 0:
        return number * page + at % PAGE * place + tl.arange(0, TILE) * place
    else:
        return number * page + (at + tl.arange(0, TILE)) % PAGE * place


@triton.jit
def mla_decode_kernel(
    q, turned_q, cache, out, lengths, block_table, parts, bests, totals, splits, scale, q_token, q_head, turned_token,
    turned_head, page, place, table_row, out_token, out_head, HEADS: tl.constexpr, ROWS: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, R_WIDTH: tl.constexpr, P_WIDTH: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences, blocks of ROWS heads, splits). ``q`` are queries in the space of latents, ``turned_q`` their
    rotated features. WHOLE: there is one split. ``scale`` is in units of log 2. Pages are looked up a tile ahead: a
    look-up that is part of the pipeline takes a stage of it, and with three stages nothing is on its way meanwhile.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    each = tl.maximum(tl.cdiv(tl.cdiv(length, TILE), splits), 1) * TILE
    first = split * each
    last = tl.minimum(first + each, length)
    head = block * ROWS + tl.arange(0, ROWS)
    column, turned = tl.arange(0, R_WIDTH), tl.arange(0, P_WIDTH)
    q_rows = q + sequence.to(tl.int64) * q_token + head[:, None] * q_head
    real = (head < HEADS)[:, None]
    plain = tl.load(q_rows + column[None, :], mask=real & (column < R)[None, :], other=0.0)
    angles = turned_q + sequence.to(tl.int64) * turned_token + head[:, None] * turned_head
    rotated = tl.load(angles + turned[None, :], mask=real & (turned < P)[None, :], other=0.0)
    best = tl.full((ROWS,), -1.0e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, R_WIDTH), tl.float32)
    table = block_table + sequence.to(tl.int64) * table_row
    number = _pages(table, first, last, PAGE, TILE)
    for at in range(first, last, TILE):
        following = _pages(table, at + TILE, last, PAGE, TILE)
        seen = at + tl.arange(0, TILE) < last
        row = cache + _places(number, at, page, place, PAGE, TILE)
        latent = tl.load(row[:, None] + column[None, :], mask=seen[:, None] & (column < R)[None, :], other=0.0)
        key = tl.load(row[:, None] + R + turned[None, :], mask=seen[:, None] & (turned < P)[None, :], other=0.0)
        best, total, mixed = folded(plain, rotated, latent, key, seen, scale, best, total, mixed)
        number = following
    leave(
        out, parts, bests, totals, best, total, mixed, sequence, split, splits, head, column, out_token, out_head,
        HEADS, R, WHOLE,
    )  # fmt: skip


@triton.jit
def mla_merge_kernel(
    parts, bests, totals, out, splits, out_token, out_head, HEADS: tl.constexpr, R: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Put COLUMNS of the parts of one head together. Grid: (sequences, heads, parts of R). SPLITS bounds the splits;
    those without keys are not read.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split = tl.arange(0, SPLITS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    here = split < splits
    index = (sequence * splits + split) * HEADS + head
    best = tl.load(bests + index, mask=here, other=-1.0e30)
    total = tl.load(totals + index, mask=here, other=0.0)
    mask = (total > 0.0)[:, None] & (column < R)[None, :]
    part = tl.load(parts + index[:, None] * R + column[None, :], mask=mask, other=0.0)
    weight = tl.math.exp2(best - tl.max(best, 0))
    whole = tl.maximum(tl.sum(total * weight, 0), 1.0e-30)
    mixed = tl.sum(part * weight[:, None], 0) / whole
    row = out + sequence * out_token + head * out_head
    tl.store(row + column, mixed.to(out.dtype.element_ty), mask=column < R)
