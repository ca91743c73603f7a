"""WaitingQueue: sequences without a slot, in the order of their keys."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from jackfield.scheduler.order import Key
from jackfield.scheduler.table import Sequence


class WaitingQueue:
    """A heap. Aborted sequences are dropped when they come to the front."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Sequence]] = []
        self._tickets = 0

    def push(self, sequence: Sequence) -> None:
        """Add a sequence; of equal keys the one that came first is first."""
        self._tickets += 1
        heapq.heappush(self._heap, (sequence.key, self._tickets, sequence))

    def first(self) -> Sequence | None:
        """Return the sequence that is next, or None."""
        while self._heap and self._heap[0][2].aborted:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> None:
        """Remove the sequence that :meth:`first` returned."""
        heapq.heappop(self._heap)

    def keys(self) -> Iterator[Key]:
        """Yield the keys of those that wait, in no order."""
        return (key for key, _, sequence in self._heap if not sequence.aborted)
