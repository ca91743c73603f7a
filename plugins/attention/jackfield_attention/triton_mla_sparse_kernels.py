# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The indexer's scores, and latent attention of single tokens to those that were chosen.

A row is a new token with the tokens that it sees; rows know nothing of one another. How many programs there are depends
on the number of rows and on bounds alone, so that a recorded graph stays right.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jackfield_attention.triton_mla_kernels import folded, leave


@triton.jit
def index_scores_kernel(
    q, weight, cache, scores, seens, table, q_row, q_head, weight_row, page, place, table_row, scores_row, width,
    J: tl.constexpr, J_WIDTH: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write what a row's index queries give for TILE tokens; minus infinity for those that it does not see. Grid:
    (rows, tiles of ``width``).
    """
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    seen = tl.load(seens + row)
    token = first + tl.arange(0, TILE)
    there = token < seen
    total = tl.zeros((TILE,), tl.float32)
    if first < seen:
        head, column = tl.arange(0, J_WIDTH), tl.arange(0, WIDTH)
        real = (head < J)[:, None] & (column < SIZE)[None, :]
        query = tl.load(q + row * q_row + head[:, None] * q_head + column[None, :], mask=real, other=0.0)
        number = tl.load(table + row * table_row + token // PAGE, mask=there, other=0).to(tl.int64)
        cells = cache + number * page + token % PAGE * place
        key = tl.load(cells[:, None] + column[None, :], mask=there[:, None] & (column < SIZE)[None, :], other=0.0)
        products = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
        weighed = tl.load(weight + row * weight_row + head, mask=head < J, other=0.0)
        total = tl.sum(tl.maximum(products, 0.0) * weighed[:, None], 0)
    found = tl.where(there, total, float("-inf"))
    tl.store(scores + row * scores_row + token, found, mask=token < width)


@triton.jit
def sparse_decode_kernel(
    q, cache, out, seens, chosen, table, parts, bests, totals, count, splits, scale, q_row, q_head, page, place,
    chosen_row, table_row, out_row, out_head, HEADS: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, R_WIDTH: tl.constexpr, P_WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of ROWS heads, splits). ``count``: entries of ``chosen`` for each row; those that the row
    does not see stand for nothing. WHOLE: there is one split. ``scale`` is in units of log 2.
    """
    row, block, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    seen = tl.load(seens + row)
    each = tl.cdiv(tl.cdiv(count, TILE), splits) * TILE
    first = split * each
    last = tl.minimum(first + each, count)
    head = block * ROWS + tl.arange(0, ROWS)
    column, turned = tl.arange(0, R_WIDTH), tl.arange(0, P_WIDTH)
    q_rows = q + row * q_row + head[:, None] * q_head
    real = (head < HEADS)[:, None]
    plain = tl.load(q_rows + column[None, :], mask=real & (column < R)[None, :], other=0.0)
    rotated = tl.load(q_rows + R + turned[None, :], mask=real & (turned < P)[None, :], other=0.0)
    best = tl.full((ROWS,), -1.0e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, R_WIDTH), tl.float32)
    for at in range(first, last, TILE):
        entry = at + tl.arange(0, TILE)
        token = tl.load(chosen + row * chosen_row + entry, mask=entry < last, other=2147483647)
        there = token < seen
        number = tl.load(table + row * table_row + token // PAGE, mask=there, other=0).to(tl.int64)
        cells = cache + number * page + token % PAGE * place
        latent = tl.load(cells[:, None] + column[None, :], mask=there[:, None] & (column < R)[None, :], other=0.0)
        key = tl.load(cells[:, None] + R + turned[None, :], mask=there[:, None] & (turned < P)[None, :], other=0.0)
        best, total, mixed = folded(plain, rotated, latent, key, there, scale, best, total, mixed)
    leave(
        out, parts, bests, totals, best, total, mixed, row, split, splits, head, column, out_row, out_head, HEADS, R,
        WHOLE,
    )  # fmt: skip
