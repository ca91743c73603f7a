"""How many drafts each sequence gets: as many as make the whole step more productive, by what was measured.

A step of T tokens takes some time, and a draft at depth k of a sequence that keeps a share r of its drafts is worth r^k
tokens. So drafts are added, the likeliest first, as long as tokens per second grow. In a full batch another token
costs nearly as much as any other, and only likely drafts are left; alone, almost any draft pays.

Legend: R sequences, K drafts.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from jackfield.scheduler.acceptance import Acceptance

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

PROBE = 64
"""Every so many steps one sequence without drafts gets one, and another step has none at all, to see what they are
worth now.
"""
WARMUP = 2
"""Steps that are measured before anything follows from it."""
TOKENS_FOR_FREE = 16.0
"""Where nothing is known: so many tokens cost as much as an empty step."""
OUTLIER = 4.0
MARGIN = 1.03
"""By how much drafts must raise tokens per second: less may be an error of measurement."""
SMOOTHING = 0.2
"""Weight of a new measurement."""
EXPIRY = 1024
"""Steps after which a measurement says nothing any more: sequences have grown."""
RATIO = 1.1
"""Between the numbers of tokens that are told apart."""


class StepCost:
    """Seconds of a step by its tokens, as measured: straight lines between numbers of tokens that occurred."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[float, float, int]] = {}
        self.steps = 0
        self.depth = 0.0
        """Seconds that the drafter takes for each depth of drafts."""

    def add(self, tokens: int, seconds: float) -> None:
        """Take a measurement; one far beyond what was expected is a disturbance."""
        if self.steps > WARMUP and seconds > OUTLIER * float(self.at(np.array([tokens]))[0]):
            return
        self.steps += 1
        place = tokens if tokens <= 10 else round(math.log(tokens) / math.log(RATIO))
        x, y, _ = self._seconds.get(place, (float(tokens), seconds, 0))
        x, y = x + SMOOTHING * (tokens - x), y + SMOOTHING * (seconds - y)
        self._seconds[place] = (x, y, self.steps)

    def add_drafting(self, depth: int, seconds: float) -> None:
        """Take a measurement of the drafter."""
        share = seconds / depth
        self.depth = share if self.depth == 0.0 else self.depth + SMOOTHING * (share - self.depth)

    def at(self, tokens_N: npt.NDArray[np.int64]) -> Floats:
        """Return [N] seconds of steps with so many tokens; any unit before something was measured."""
        known = sorted((x, y) for x, y, step in self._seconds.values() if self.steps - step < EXPIRY)
        if not known:
            return np.asarray(TOKENS_FOR_FREE + tokens_N)
        x, y = np.array(known).T
        y = np.maximum.accumulate(y)
        inside: Floats = np.interp(tokens_N, x, y)
        below = y[0] * (TOKENS_FOR_FREE + tokens_N) / (TOKENS_FOR_FREE + x[0])
        slope = y[-1] / (TOKENS_FOR_FREE + x[-1])
        if len(x) > 1:
            slope = max(slope, (y[-1] - y[0]) / (x[-1] - x[0]))
        above = y[-1] + slope * (tokens_N - x[-1])
        return np.where(tokens_N < x[0], below, np.where(tokens_N > x[-1], above, inside))


class DraftLengths:
    """Chooses, by slot.

    Args:
        slots: sequences that run at once. width: K. adaptive: follow measurements; else every sequence gets K drafts.
        largest_batch: sequences beyond which there are no drafts, or None.
    """

    def __init__(self, slots: int, width: int, *, adaptive: bool = True, largest_batch: int | None = None) -> None:
        self._width, self._adaptive, self._largest_batch = width, adaptive, largest_batch
        self.acceptance = Acceptance(slots)
        self._steady = np.zeros(slots, dtype=np.bool_)
        self._calls = 0
        self.cost = StepCost()

    def fill(self, slot: int, *, steady: bool) -> None:
        """Begin a sequence; a ``steady`` one always gets K drafts: its tokens depend on their number."""
        self.acceptance.fill(slot)
        self._steady[slot] = steady

    def choose(self, slots: Ints) -> Ints:
        """Return [R] most drafts for each sequence of the next step."""
        width, count = self._width, len(slots)
        if self._largest_batch is not None and count > self._largest_batch:
            return np.zeros(count, dtype=np.int32)
        full = np.full(count, width, dtype=np.int32)
        if not self._adaptive or not count:
            return full
        self._calls += 1
        if self.cost.steps < WARMUP:
            return full
        chosen = self._best(self.acceptance.rates(slots))
        turn = self._calls % PROBE
        if turn == WARMUP + 1:
            chosen[:] = 0
        elif turn == PROBE // 2:
            at = self._calls // PROBE % count
            chosen[at] = max(chosen[at], 1)
        return np.where(self._steady[slots], full, chosen)

    def _best(self, rates: Floats) -> Ints:
        """Return drafts of each sequence with which most tokens come out per second."""
        count = len(rates)
        worth = rates[:, None] ** np.arange(1, self._width + 1)
        step = self.cost.at(np.arange(count, count * (self._width + 1) + 1))
        best, found = MARGIN * count / step[0], np.zeros(count, dtype=np.int32)
        for depth in range(1, self._width + 1) if self.cost.depth > 0.0 else (self._width,):
            ranked = np.sort(worth[:, :depth], axis=None)[::-1]
            rate = (count + np.cumsum(ranked)) / (step[1 : 1 + len(ranked)] + self.cost.depth * depth)
            at = int(np.argmax(rate))
            if rate[at] > best:
                best, found = rate[at], (worth[:, :depth] >= ranked[at]).sum(1, dtype=np.int32)
        return found
