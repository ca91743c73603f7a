# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The ops around the model in a recorded step, one or two launches each: there are as many of them in a step as in a
layer, and in a small model a launch is what counts. PDL: see ``jackfield_triton.launch``.

Legend: S slots, L longest text, M blocks of a sequence, B sequences, N tokens of each, K = N - 1 drafts, R rows, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from jackfield.interfaces import TokenInputs
from jackfield_triton.launch import launch_options, power_of_two

BLOCK = 2048
"""Logits that a program looks at at once."""
PROGRAMS = 256
"""Programs that a search for the largest logits is cut into, where there are so many blocks."""
TABLE = 1024
"""Entries of a block table that are copied at once."""


@triton.jit
def largest_parts_kernel(logits, bests, places, vocab, row_stride, size, parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Find the largest logit, and the first place that has it, of one part of a row. NaN counts as the least."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.full((BLOCK,), 2147483647, tl.int32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    first = part * size
    for start in range(first, tl.minimum(first + size, vocab), BLOCK):
        at = start + lane
        value = tl.load(logits + row * row_stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        place = tl.where((value > best) | ((place == 2147483647) & (at < vocab)), at, place)
        best = tl.where(value > best, value, best)
    top = tl.max(best, 0)
    tl.store(bests + row * parts + part, top)
    tl.store(places + row * parts + part, tl.min(tl.where(best == top, place, 2147483647), 0))


@triton.jit
def largest_kernel(bests, places, ids, parts, PARTS: tl.constexpr, PDL: tl.constexpr):
    """Put the parts of a row together."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    lane = tl.arange(0, PARTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    best = tl.load(bests + row * parts + lane, mask=lane < parts, other=float("-inf"))
    place = tl.load(places + row * parts + lane, mask=lane < parts, other=2147483647)
    tl.store(ids + row, tl.min(tl.where(best == tl.max(best, 0), place, 2147483647), 0).to(tl.int64))


@triton.jit
def token_inputs_kernel(
    tokens, table, slots, starts, counts, ids, nexts, positions, cells, rows, lengths, length, blocks, shift,
    WIDTH: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr, TABLE: tl.constexpr, ALL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """What the tokens of one sequence take from the tables."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence = tl.program_id(0).to(tl.int64)
    slot, start = tl.load(slots + sequence), tl.load(starts + sequence) + shift
    token = tl.arange(0, LANES)
    mine, place = token < WIDTH, start + token
    text, mapped = tokens + slot * length, table + slot * blocks
    block = tl.load(mapped + tl.minimum(place // PAGE, blocks - 1), mask=mine, other=0).to(tl.int64)
    cell, position = block * PAGE + place % PAGE, place
    if not ALL:
        real = token + shift < tl.load(counts + sequence)
        cell, position = tl.where(real, cell, -1), tl.where(real, place, 0)
    out = sequence * WIDTH + token
    tl.store(ids + out, tl.load(text + tl.minimum(place, length - 1), mask=mine, other=0).to(tl.int64), mask=mine)
    tl.store(nexts + out, tl.load(text + tl.minimum(place + 1, length - 1), mask=mine, other=0).to(tl.int64), mask=mine)
    tl.store(positions + out, position, mask=mine)
    tl.store(cells + out, cell, mask=mine)
    tl.store(lengths + sequence, (start + WIDTH).to(tl.int32))
    lane = tl.arange(0, TABLE)
    for first in range(0, blocks, TABLE):
        at = first + lane
        tl.store(rows + sequence * blocks + at, tl.load(mapped + at, mask=at < blocks), mask=at < blocks)


@triton.jit
def begin_round_kernel(
    tokens, known, proposed, slots, starts, counts, drafts, begun, counted, texts, length, sequences,
    K: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Where one sequence's round begins, and its drafts behind the known tokens."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence = tl.program_id(0).to(tl.int64)
    slot, start, count = tl.load(slots + sequence), tl.load(starts + sequence), tl.load(counts + sequence)
    left = start < 0
    start = tl.where(left, tl.load(known + slot) - 1, start)
    count = tl.where(left, tl.minimum(count, tl.load(proposed + slot)), count)
    draft = tl.arange(0, LANES)
    place = tokens + slot * length + start + 1 + draft
    given = tl.load(drafts + draft * sequences + sequence, mask=draft < K, other=0)
    stored = tl.load(place, mask=draft < K, other=0).to(tl.int64)
    text = tl.where(given < 0, stored, given)
    tl.store(place, text.to(tl.int32), mask=draft < K)
    tl.store(texts + sequence * K + draft, text, mask=draft < K)
    tl.store(begun + sequence, start)
    tl.store(counted + sequence, count)


@triton.jit
def keep_tokens_kernel(
    tokens, known, slots, starts, counts, drafts, ids, kept, last, length,
    K: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """How many drafts of one sequence are what was sampled in their place, and the token behind them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence = tl.program_id(0).to(tl.int64)
    slot, start = tl.load(slots + sequence), tl.load(starts + sequence)
    found = tl.zeros((), tl.int64)
    if K:
        draft = tl.arange(0, LANES)
        mine = (draft < K) & (draft < tl.load(counts + sequence))
        said = tl.load(drafts + sequence * K + draft, mask=mine, other=-1)
        same = mine & (said == tl.load(ids + sequence * (K + 1) + draft, mask=mine, other=-2))
        found += tl.min(tl.where(same, LANES, draft), 0).to(tl.int64)
        found = tl.minimum(found, K)
    token = tl.load(ids + sequence * (K + 1) + found)
    end = start + 1 + found
    tl.store(tokens + slot * length + end, token.to(tl.int32))
    tl.store(known + slot, end + 1)
    tl.store(kept + sequence, found)
    tl.store(last + sequence, token)


@triton.jit
def end_round_kernel(
    tokens, proposed, slots, starts, kept, room, ids, found, result, length, vocab,
    K: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The tokens that one sequence's round gave, and its next drafts, behind the known tokens."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence = tl.program_id(0).to(tl.int64)
    slot, start, count = tl.load(slots + sequence), tl.load(starts + sequence), tl.load(kept + sequence)
    lane = tl.arange(0, LANES)
    draft = tl.load(found + sequence * K + lane, mask=lane < K, other=-1)
    legal = (draft >= 0) & (draft < vocab) & (lane < tl.load(room + sequence)) & (lane < K)
    drafts = tl.min(tl.where(legal, LANES, lane), 0)
    there = lane < drafts
    tl.store(tokens + slot * length + start + 2 + count + lane, draft.to(tl.int32), mask=there & (lane < K))
    tl.store(proposed + slot, tl.minimum(drafts, K).to(tl.int64))
    out = result + sequence * (2 * K + 1)
    token = tl.load(ids + sequence * (K + 1) + lane, mask=lane <= K, other=0)
    tl.store(out + lane, tl.where(lane <= count, token, -1).to(tl.int32), mask=lane <= K)
    tl.store(out + K + 1 + lane, tl.where(there, draft, -1).to(tl.int32), mask=lane < K)


def greedy_tokens(logits_RV: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """See ``jackfield.layers.step_ops``; rows may lie apart."""
    rows, vocab = logits_RV.shape
    ids = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    if not rows:
        return ids
    blocks = -(-vocab // BLOCK)
    size = -(-blocks // max(1, min(blocks, PROGRAMS // rows))) * BLOCK
    parts = -(-vocab // size)
    bests = torch.empty((rows, parts), dtype=torch.float32, device=ids.device)
    places, options = torch.empty_like(bests, dtype=torch.int32), launch_options(pdl)
    stride = logits_RV.stride(0)
    largest_parts_kernel[(rows, parts)](
        logits_RV, bests, places, vocab, stride, size, parts, BLOCK=BLOCK, num_warps=8, **options
    )
    largest_kernel[(rows,)](bests, places, ids, parts, PARTS=power_of_two(parts), num_warps=1, **options)
    return ids


def token_inputs(
    tokens_SL: torch.Tensor,
    table_SM: torch.Tensor,
    slots_B: torch.Tensor,
    starts_B: torch.Tensor,
    counts_B: torch.Tensor | None,
    width: int,
    block_size: int,
    shift: int = 0,
    pdl: bool = False,
) -> TokenInputs:
    """See ``jackfield.layers.step_ops``."""
    count, blocks, device = len(slots_B), table_SM.shape[1], slots_B.device
    ids, nexts, positions, cells = torch.empty((4, count * width), dtype=torch.int64, device=device)
    rows = torch.empty((count, blocks), dtype=torch.int32, device=device)
    lengths = torch.empty(count, dtype=torch.int32, device=device)
    token_inputs_kernel[(count,)](
        tokens_SL,
        table_SM,
        slots_B,
        starts_B,
        slots_B if counts_B is None else counts_B,
        ids,
        nexts,
        positions,
        cells,
        rows,
        lengths,
        tokens_SL.shape[1],
        blocks,
        shift,
        WIDTH=width,
        LANES=power_of_two(width),
        PAGE=block_size,
        TABLE=min(TABLE, power_of_two(blocks)),
        ALL=counts_B is None,
        num_warps=4,
        **launch_options(pdl),
    )
    return TokenInputs(ids, nexts, positions, cells, rows, lengths)


def begin_round(
    tokens_SL: torch.Tensor,
    known_S: torch.Tensor,
    proposed_S: torch.Tensor,
    slots_B: torch.Tensor,
    starts_B: torch.Tensor,
    counts_B: torch.Tensor,
    drafts_KB: torch.Tensor,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``jackfield.layers.step_ops``."""
    width, count = drafts_KB.shape
    begun, counted = torch.empty((2, count), dtype=torch.int64, device=slots_B.device)
    texts = torch.empty((count, width), dtype=torch.int64, device=slots_B.device)
    begin_round_kernel[(count,)](
        tokens_SL,
        known_S,
        proposed_S,
        slots_B,
        starts_B,
        counts_B,
        drafts_KB,
        begun,
        counted,
        texts,
        tokens_SL.shape[1],
        count,
        K=width,
        LANES=power_of_two(width),
        num_warps=1,
        **launch_options(pdl),
    )
    return begun, counted, texts


def keep_tokens(
    tokens_SL: torch.Tensor,
    known_S: torch.Tensor,
    slots_B: torch.Tensor,
    starts_B: torch.Tensor,
    counts_B: torch.Tensor,
    drafts_BK: torch.Tensor,
    ids_BN: torch.Tensor,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``jackfield.layers.step_ops``."""
    width = drafts_BK.shape[1]
    kept, last = torch.empty((2, len(slots_B)), dtype=torch.int64, device=slots_B.device)
    keep_tokens_kernel[(len(slots_B),)](
        tokens_SL,
        known_S,
        slots_B,
        starts_B,
        counts_B,
        drafts_BK,
        ids_BN,
        kept,
        last,
        tokens_SL.shape[1],
        K=width,
        LANES=power_of_two(width),
        num_warps=1,
        **launch_options(pdl),
    )
    return kept, last


def end_round(
    tokens_SL: torch.Tensor,
    proposed_S: torch.Tensor,
    slots_B: torch.Tensor,
    starts_B: torch.Tensor,
    kept_B: torch.Tensor,
    room_B: torch.Tensor,
    ids_BN: torch.Tensor,
    found_BK: torch.Tensor,
    vocab_size: int,
    pdl: bool = False,
) -> torch.Tensor:
    """See ``jackfield.layers.step_ops``."""
    count, width = found_BK.shape
    result = torch.empty((count, 2 * width + 1), dtype=torch.int32, device=slots_B.device)
    end_round_kernel[(count,)](
        tokens_SL,
        proposed_S,
        slots_B,
        starts_B,
        kept_B,
        room_B,
        ids_BN,
        found_BK.contiguous(),
        result,
        tokens_SL.shape[1],
        vocab_size,
        K=width,
        LANES=power_of_two(width + 1),
        num_warps=1,
        **launch_options(pdl),
    )
    return result


LAUNCHERS: dict[str, Callable[..., Any]] = {
    "greedy_tokens": greedy_tokens,
    "token_inputs": token_inputs,
    "begin_round": begin_round,
    "keep_tokens": keep_tokens,
    "end_round": end_round,
}
"""By the names of :data:`jackfield.interfaces.STEP_OPS`."""
