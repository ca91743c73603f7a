"""Histograms: how often a value fell under each of some bounds."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

_DECADES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
SECONDS = (*(round(base * step, 6) for base in _DECADES for step in (1, 2.5, 5)), 1000.0)
"""Bounds for times: 1, 2.5 and 5 in each decade from 0.1 ms to 1000 s."""
COUNTS = tuple(float(base * step) for base in (1, 10, 100, 1000, 10_000, 100_000) for step in (1, 2, 5))
"""Bounds for numbers of tokens: 1, 2 and 5 in each decade up to 500,000."""
FEW = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
"""Bounds for the number of completions of a request."""


@dataclass(frozen=True, slots=True)
class HistogramData:
    """A histogram as it stood at a moment.

    Args:
        bounds: upper bounds, inclusive, rising; one more bucket without a bound follows.
        cumulative: how many values are at most each bound; the last is the number of all values.
        total: the sum of all values.
    """

    bounds: tuple[float, ...]
    cumulative: tuple[int, ...]
    total: float = 0.0

    @property
    def count(self) -> int:
        """How many values were seen."""
        return self.cumulative[-1]


class Histogram:
    """Counts values by bounds, as for :class:`HistogramData`."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def data(self) -> HistogramData:
        """Return the numbers."""
        return HistogramData(self._bounds, tuple(accumulate(self._counts)), self._total)
