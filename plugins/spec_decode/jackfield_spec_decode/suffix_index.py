"""The suffix trees of one engine: one for each sequence, and one of the answers of requests that ended.

Legend: B sequences, K drafts.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from jackfield_spec_decode.suffix_tree import Match, SuffixTree

Ints = npt.NDArray[np.integer[Any]]


@dataclass(slots=True)
class _Sequence:
    """A running sequence: its tree, its tokens so far, how many of them are its prompt, and its longest matches."""

    tree: SuffixTree
    prompt: int
    text: array[int] = field(default_factory=lambda: array("i"))
    matches: list[Match] = field(default_factory=list)


class SuffixIndex:
    """Proposes by suffix trees.

    Args:
        width: K. max_tree_depth: longest run. max_spec_factor: draft tokens for each matched one. min_token_prob: of
            a path. max_cached_requests, max_cached_tokens: of the common tree.
    """

    def __init__(
        self,
        width: int,
        *,
        max_tree_depth: int,
        max_spec_factor: float,
        min_token_prob: float,
        max_cached_requests: int,
        max_cached_tokens: int,
    ) -> None:
        self._width, self._depth = width, max_tree_depth
        self._factor, self._floor = max_spec_factor, min_token_prob
        self._most_requests, self._most_tokens = max_cached_requests, max_cached_tokens
        self._slots: dict[int, _Sequence] = {}
        self._common = SuffixTree(max_tree_depth)
        self._answers: deque[array[int]] = deque()
        self._cached = 0

    def propose(self, tokens: Ints, slots: Ints, lengths: Ints, limits: Ints) -> npt.NDArray[np.int32]:
        """Return drafts [B, K], -1 behind the last of a row.

        Args:
            tokens: [slots, length] token table. slots, lengths: [B]. limits: [B] most drafts of each row.
        """
        drafts = np.full((len(slots), self._width), -1, dtype=np.int32)
        for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            sequence = self._read(slot, tokens[slot], length)
            wanted = min(self._width, int(limits[row]))
            if wanted > 0:
                found = self._draft(sequence, wanted)
                drafts[row, : len(found)] = found
        return drafts

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the trees of sequences that ended, and remember their answers."""
        for slot in slots:
            sequence = self._slots.pop(slot, None)
            if sequence is not None:
                self._remember(sequence.text[sequence.prompt :])

    def _read(self, slot: int, row: Ints, length: int) -> _Sequence:
        """Return what is known of a slot, after reading what its sequence got since the last time."""
        known = self._slots.get(slot)
        if known is None or len(known.text) > length or list(known.text[-4:]) != _tail(row, len(known.text)):
            # The last token was sampled: what comes before is the prompt.
            known = self._slots[slot] = _Sequence(SuffixTree(self._depth), length - 1)
        read = len(known.text)
        known.text.extend(row[read:length].tolist())
        for at in range(read, length):
            known.matches = known.tree.append(known.text, at, known.matches)
        return known

    def _draft(self, sequence: _Sequence, wanted: int) -> list[int]:
        """Return the draft of which most is expected to be right; of equal ones that of the longest match here."""
        best: list[int] = []
        most = 0.0
        text = sequence.text
        for tree, matches, own in (
            (sequence.tree, sequence.matches, text),
            (self._common, self._common.matches(text, len(text)), None),
        ):
            for node, length in matches:
                limit = min(wanted, int(self._factor * length))
                if limit <= most:
                    continue  # no draft of so few tokens can be better
                found, score = tree.follow(node, length, limit, self._floor, own)
                if score > most:
                    best, most = found, score
        return best

    def _remember(self, answer: array[int]) -> None:
        if not len(answer) or not self._most_requests or len(answer) > self._most_tokens:
            return
        self._answers.append(answer)
        self._common.add(answer)
        self._cached += len(answer)
        while len(self._answers) > self._most_requests or self._cached > self._most_tokens:
            oldest = self._answers.popleft()
            self._common.remove(oldest)
            self._cached -= len(oldest)


def _tail(row: Ints, read: int) -> list[int]:
    found: list[int] = row[max(0, read - 4) : read].tolist()
    return found
