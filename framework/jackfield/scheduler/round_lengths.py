"""Whether recorded rounds of speculation pay. A recorded round takes what it takes, however many of its drafts are
wanted: so all sequences of a step draft, or none does.

What both kinds of step take was measured when they were recorded, and is measured again whenever one runs. How many
drafts a sequence keeps is known of those that had some; while none has any, that knowledge fades, so that drafts are
tried again.

Legend: R sequences, K drafts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jackfield.protocol import Recordings
from jackfield.scheduler.acceptance import Acceptance

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
MARGIN = 1.03
"""By how much drafts must raise tokens per second: less may be an error of measurement."""
SMOOTHING = 0.1
"""Weight of a new measurement."""
OUTLIER = 4.0
"""A step that takes so many times what was expected was disturbed."""


class RoundLengths:
    """Chooses, by slot.

    Args:
        slots: sequences that run at once. width: K. recordings: of the worker. adaptive: follow measurements; else
            every sequence gets K drafts. largest_batch: sequences beyond which there are no drafts, or None.
    """

    def __init__(
        self, slots: int, width: int, recordings: Recordings, *, adaptive: bool = True, largest_batch: int | None = None
    ) -> None:
        self._width, self._adaptive = width, adaptive
        self.acceptance = Acceptance(slots)
        self._steady = np.zeros(slots, dtype=np.bool_)
        self._rounds, self._decodes = dict(recordings.rounds), dict(recordings.decodes)
        self._slots, self._largest = slots, max(self._rounds)
        self._allowed = self._largest if adaptive else slots
        if largest_batch is not None:
            self._allowed = min(self._allowed, largest_batch)

    def fill(self, slot: int, *, steady: bool) -> None:
        """Begin a sequence; a ``steady`` one always gets K drafts: its tokens depend on their number."""
        self.acceptance.fill(slot)
        self._steady[slot] = steady

    def hopeless(self, sequences: int) -> bool:
        """Return whether so many sequences, of which not all need run at once, are too many for drafts."""
        return min(sequences, self._slots) > self._allowed

    def fits(self, sequences: int) -> bool:
        """Return whether rounds of so many sequences are recorded."""
        return 0 < sequences <= self._largest

    def measure(self, sequences: int, seconds: float, *, drafts: bool) -> None:
        """Take what a step took."""
        known = self._rounds if drafts else self._decodes
        size = min((size for size in known if size >= sequences), default=0)
        if size and seconds < OUTLIER * known[size]:
            known[size] += SMOOTHING * (seconds - known[size])

    def choose(self, slots: Ints, able: Bools) -> Ints:
        """Return [R] most drafts of each sequence; only those that are ``able`` get some."""
        count = len(slots)
        none = np.zeros(count, dtype=np.int32)
        if not able.any() or count > self._allowed:
            return none
        full = np.where(able, self._width, 0).astype(np.int32)
        if not self._adaptive:
            return full
        rates = self.acceptance.rates(slots[able])
        worth = float((rates[:, None] ** np.arange(1, self._width + 1)).sum())
        drafted = (count + worth) / self._at(self._rounds, count)
        if drafted > MARGIN * count / self._at(self._decodes, count):
            return full
        self.acceptance.fade(slots)
        return np.where(self._steady[slots], full, none)

    @staticmethod
    def _at(known: dict[int, float], sequences: int) -> float:
        return known[min((size for size in known if size >= sequences), default=max(known))]
