"""Drafts of a model that runs beside the target. Legend: B sequences, E width, K drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import DraftBatch, DraftModel, Drafts, TargetStep
from jackfield_spec_decode.draft_rows import limited, no_drafts

Ints = npt.NDArray[Any]
UNKNOWN = -1


class ModelDrafts:
    """Keeps count of which tokens the draft model has computed, and lets it go on from there.

    Args:
        model: the draft model. slots: sequences that run at once.
    """

    def __init__(self, model: DraftModel, slots: int) -> None:
        self._model = model
        self._computed = np.full(slots, UNKNOWN, dtype=np.int32)
        """Tokens of each slot's sequence whose keys and values are in the cache."""

    def follow(self, step: TargetStep) -> None:
        """Compute parts of prompts as the target does, so that blocks hold both models' halves when they are shared."""
        fresh = self._computed[step.slots] == UNKNOWN
        self._computed[step.slots[fresh]] = step.starts[fresh]
        ends = step.starts + step.counts
        behind = ~step.samples & (ends <= self._model.max_length) & (self._computed[step.slots] < ends)
        if behind.any():
            self._catch_up(step.slots[behind], ends[behind])

    def propose(self, batch: DraftBatch) -> Drafts:
        """Return drafts [B, K], each drawn behind the one before it."""
        assert batch.draw is not None
        slots, lengths = batch.slots, batch.lengths
        # The draft model must be able to see the last draft but one.
        limits = np.clip(self._model.max_length + 1 - lengths, 0, batch.limits)
        rows = np.flatnonzero(limits > 0)
        hidden_BE = self._start(slots, lengths, rows)
        if hidden_BE is None:
            return no_drafts(len(slots))
        ids: list[torch.Tensor] = []
        for place in range(int(limits.max())):
            if place:
                rows = np.flatnonzero(limits > place)
                index = torch.from_numpy(rows).to(hidden_BE.device)
                ones = np.ones(len(rows), dtype=np.int32)
                starts = lengths[rows] + place - 1
                hidden_BE[index] = self._model.run(slots[rows], starts, ones, ids[-1][index])
                self._computed[slots[rows]] = starts + 1
            ids.append(batch.draw(self._model.logits(hidden_BE), place))
        return limited(ids, limits)

    def forget(self, slots: Sequence[int]) -> None:
        """Forget sequences that gave up their slots."""
        self._computed[list(slots)] = UNKNOWN

    def _start(self, slots: Ints, lengths: Ints, rows: Ints) -> torch.Tensor | None:
        """Return [B, E] the hidden states of all last tokens; of sequences not in ``rows`` anything."""
        if not len(rows):
            return None
        found_RE = self._catch_up(slots[rows], lengths[rows])
        hidden_BE = found_RE.new_zeros((len(slots), found_RE.shape[1]))
        hidden_BE[torch.from_numpy(rows).to(found_RE.device)] = found_RE
        return hidden_BE

    def _catch_up(self, slots: Ints, lengths: Ints) -> torch.Tensor:
        """Compute what is missing of the first ``lengths`` tokens, the last one in any case: what the cache holds of
        drafts that were refused is written anew.
        """
        starts = np.clip(self._computed[slots], 0, lengths - 1)
        last_BE = self._model.run(slots, starts, (lengths - starts).astype(np.int32))
        self._computed[slots] = lengths
        return last_BE
