"""Which sequences end with a token, and why. In this order: stop ids, length, repetition."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from jackfield.protocol import FinishReason, RepetitionDetection
from jackfield.scheduler.table import SlotTable

REPETITION = "repetition"
"""Stop reason of a sequence that repeats itself."""

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


def ended(table: SlotTable, slots: Ints, tokens: npt.NDArray[Any]) -> Bools:
    """Return which slots end with the token that each just got; the table holds it already."""
    over: Bools = stop_hits(table, slots, tokens) | (table.confirmed[slots] >= table.total[slots])
    if table.repetition:
        for at, slot in enumerate(slots.tolist()):
            over[at] = over[at] or _repetition_hit(table, slot)
    return over


def end_of(
    table: SlotTable, slot: int, token: int, eos_token_ids: Collection[int]
) -> tuple[FinishReason, int | str | None]:
    """Return why a slot ended with ``token``, and its stop reason."""
    if stop_hits(table, np.array([slot], dtype=np.int32), np.array([token]))[0]:
        # The model's own end has no stop reason; an id the user gave is one.
        return FinishReason.STOP, None if token in eos_token_ids else token
    if table.confirmed[slot] >= table.total[slot]:
        return FinishReason.LENGTH, None
    return FinishReason.STOP, REPETITION


def stop_hits(table: SlotTable, slots: Ints, tokens: npt.NDArray[Any]) -> Bools:
    """Return which tokens are stop ids of their slot and count as such."""
    hits: Bools = (table.stops[slots] == tokens[:, None]).any(axis=1)
    enough = table.confirmed[slots] - table.prompt[slots] > table.min_tokens[slots]
    return hits & enough


def repeats(output: npt.NDArray[Any], wish: RepetitionDetection) -> bool:
    """Return whether ``output`` ends with ``min_count`` copies of one pattern whose size is in range."""
    for size in range(max(1, wish.min_pattern_size), wish.max_pattern_size + 1):
        span = size * wish.min_count
        if span > len(output):
            return False
        if output[-1] == output[-1 - size] and np.array_equal(output[-span:-size], output[len(output) - span + size :]):
            return True
    return False


def _repetition_hit(table: SlotTable, slot: int) -> bool:
    wish = table.repetition.get(slot)
    prompt, confirmed = int(table.prompt[slot]), int(table.confirmed[slot])
    if wish is None or confirmed - prompt < table.min_tokens[slot]:
        return False
    return repeats(table.tokens[slot, prompt:confirmed], wish)
