"""Which share of its drafts a sequence keeps. Legend: R sequences."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

FORGETTING = 0.95
"""Weight of rounds one round earlier."""
PRIOR = 2.0
"""Rounds that the rate over all sequences counts for in each one's own."""
FIRST_RATE = 0.6
FADING = 0.99
"""Weight that is left of what is known after a step in which nobody drafted."""


class Acceptance:
    """Estimates, by slot.

    Args:
        slots: sequences that run at once.
    """

    def __init__(self, slots: int) -> None:
        self._kept: Floats = np.zeros(slots)
        self._rounds: Floats = np.zeros(slots)
        self._all_kept, self._all_rounds = FIRST_RATE * PRIOR, PRIOR

    def fill(self, slot: int) -> None:
        """Begin a sequence."""
        self._kept[slot] = self._rounds[slot] = 0.0

    def observe(self, slots: Ints, drafts: Ints, kept: Ints) -> None:
        """Learn how many drafts were kept. All arguments are [R]."""
        had = drafts > 0
        slots, drafts, kept = slots[had], drafts[had], kept[had]
        judged = kept + (kept < drafts)
        self._kept[slots] = FORGETTING * self._kept[slots] + kept
        self._rounds[slots] = FORGETTING * self._rounds[slots] + judged
        if len(slots):
            keep = FORGETTING ** (len(slots) / 8)
            self._all_kept = keep * self._all_kept + float(kept.sum())
            self._all_rounds = keep * self._all_rounds + float(judged.sum())

    def fade(self, slots: Ints) -> None:
        """Trust what is known of these sequences, and of all, a little less."""
        self._kept[slots] *= FADING
        self._rounds[slots] *= FADING
        self._all_kept = FADING * self._all_kept + (1 - FADING) * FIRST_RATE * PRIOR
        self._all_rounds = FADING * self._all_rounds + (1 - FADING) * PRIOR

    def rates(self, slots: Ints) -> Floats:
        """Return [R] the estimated share of drafts that each sequence keeps."""
        mean = self._all_kept / self._all_rounds
        rates: Floats = (self._kept[slots] + PRIOR * mean) / (self._rounds[slots] + PRIOR)
        return rates
