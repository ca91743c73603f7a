"""Parts of prompts that are no text: their embeddings take the place of placeholders. Legend: T tokens, E width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from jackfield.protocol import Feature, NewSequence, SchedulerOutput
from jackfield.worker.transfer import Transfer


@dataclass(frozen=True, slots=True)
class _Part:
    start: int
    stop: int
    values: torch.Tensor


class FeatureTable:
    """Embeddings by slot. A step asks nothing of it while no running request has any.

    Args:
        transfer: to the device. dtype: of embeddings there. width: E.
    """

    def __init__(self, transfer: Transfer, dtype: torch.dtype, width: int) -> None:
        self._transfer, self._dtype, self._width = transfer, dtype, width
        self._parts: dict[int, list[_Part]] = {}

    def fill(self, new: Sequence[NewSequence]) -> None:
        """Take what new sequences bring."""
        for one in new:
            if one.features:
                self._parts[one.slot] = [self._part(feature) for feature in one.features]

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self._parts.pop(slot, None)

    def touches(self, plan: SchedulerOutput) -> bool:
        """Return whether the step computes a placeholder."""
        return bool(self._parts) and any(True for _ in self._overlaps(plan))

    def merge(self, plan: SchedulerOutput, ends: npt.NDArray[np.int64], hidden_TE: torch.Tensor) -> None:
        """Put embeddings in the places of a step's placeholders.

        Args:
            ends: [B] index in the step after each sequence's last token.
        """
        for row, part, low, high in self._overlaps(plan):
            first = int(ends[row]) - int(plan.counts[row]) - int(plan.starts[row])
            hidden_TE[first + low : first + high] = part.values[low - part.start : high - part.start]

    def _overlaps(self, plan: SchedulerOutput) -> Iterator[tuple[int, _Part, int, int]]:
        """Yield (row, part, first, last) where a step's tokens of a sequence and a part overlap, in positions."""
        for row in np.flatnonzero(np.isin(plan.slots, list(self._parts))).tolist():
            start = int(plan.starts[row])
            stop = start + int(plan.counts[row])
            for part in self._parts[int(plan.slots[row])]:
                if (low := max(start, part.start)) < (high := min(stop, part.stop)):
                    yield row, part, low, high

    def _part(self, feature: Feature) -> _Part:
        values = np.frombuffer(feature.embeddings, dtype="<f4").reshape(-1, self._width)
        tensor = self._transfer.send(values.copy()).to(self._dtype)
        return _Part(feature.position, feature.position + feature.length, tensor)
