"""Where each n-gram of a sequence ended last, kept up as the sequence grows. Legend: B sequences, K drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer[Any]]
_WIDTH = 4
"""Bytes of a token id."""


@dataclass(slots=True)
class _Known:
    """What is known of one slot: for each n-gram (its bytes) where it ended last, and how far the sequence is read.

    ``head`` and ``tail`` are the first tokens and the last ones that were read; another sequence in the slot differs
    in one of them, but for rare cases that the check of every match catches.
    """

    ends: dict[bytes, int] = field(default_factory=dict)
    read: int = 0
    head: bytes = b""
    tail: bytes = b""


class NgramIndex:
    """Indexes of all slots.

    Args:
        shortest, longest: sizes of the n-grams. width: K.
    """

    def __init__(self, shortest: int, longest: int, width: int) -> None:
        self._shortest, self._longest, self._width = shortest, longest, width
        self._slots: dict[int, _Known] = {}

    def propose(self, tokens: Ints, slots: Ints, lengths: Ints, limits: Ints) -> npt.NDArray[np.int32]:
        """Return drafts [B, K], -1 behind the last of a row.

        Args:
            tokens: [slots, length] token table. slots, lengths: [B]. limits: [B] most drafts of each row.
        """
        drafts = np.full((len(slots), self._width), -1, dtype=np.int32)
        for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            wanted = min(self._width, int(limits[row]))
            if wanted <= 0:
                continue
            sequence = np.ascontiguousarray(tokens[slot, :length], dtype=np.int32)
            end = self._last_match(slot, sequence)
            if end:
                # A match that reaches into itself is a loop: what follows it goes on with what was just proposed.
                drafts[row, :wanted] = sequence[end + np.arange(wanted) % (length - end)]
        return drafts

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the indexes of slots whose sequences ended."""
        for slot in slots:
            self._slots.pop(slot, None)

    def _last_match(self, slot: int, sequence: npt.NDArray[np.int32]) -> int:
        """Return the end of the most recent earlier occurrence of the longest suffix that has one, or 0."""
        length = len(sequence)
        ends = self._read_up_to(slot, sequence, length - 1).ends
        for size in range(min(self._longest, length - 1), self._shortest - 1, -1):
            suffix = sequence[length - size :].tobytes()
            end = ends.get(suffix, 0)
            if size <= end < length and sequence[end - size : end].tobytes() == suffix:
                return end
        return 0

    def _read_up_to(self, slot: int, sequence: npt.NDArray[np.int32], stop: int) -> _Known:
        """Index every n-gram that ends at ``stop`` or before; the suffix itself stays out, to be found elsewhere."""
        known = self._slots.get(slot)
        if known is None or not self._continues(known, sequence):
            known = self._slots[slot] = _Known()
        first = max(0, known.read - self._longest)
        data = sequence[first:stop].tobytes()
        for end in range(known.read + 1, stop + 1):
            at = (end - first) * _WIDTH
            for size in range(self._shortest, min(self._longest, end) + 1):
                known.ends[data[at - size * _WIDTH : at]] = end
        if stop > known.read:
            known.read = stop
            known.head = sequence[: min(stop, self._longest)].tobytes()
            known.tail = sequence[max(0, stop - self._longest) : stop].tobytes()
        return known

    def _continues(self, known: _Known, sequence: npt.NDArray[np.int32]) -> bool:
        """Return whether the slot holds the sequence that was read, or a longer form of it."""
        read = known.read
        if len(sequence) < read:
            return False
        start = read - len(known.tail) // _WIDTH
        return (
            sequence[start:read].tobytes() == known.tail
            and sequence[: len(known.head) // _WIDTH].tobytes() == known.head
        )
