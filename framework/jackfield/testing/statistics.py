"""Whether counts come from a distribution."""

from __future__ import annotations

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
LEAST = 5.0
"""Cells in which fewer are expected are counted together."""


def assert_distributed(counts: Floats, probabilities: Floats) -> None:
    """Fail when counts deviate from probabilities as chance would once in millions of times (Pearson's chi-square).

    Args:
        counts: how often each outcome came. probabilities: of the same outcomes; where one is 0 none may come.
    """
    counts, probabilities = counts.ravel(), probabilities.ravel()
    assert not counts[probabilities == 0].any(), "an outcome came that cannot"
    expected = probabilities / probabilities.sum() * counts.sum()
    rare = expected < LEAST
    cells = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    seen, wanted = (cell[cells[1] > 0] for cell in cells)
    assert len(wanted) > 1, "too few outcomes to compare"
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    limit = freedom + 5 * float(np.sqrt(2 * freedom)) + 10
    assert statistic < limit, f"chi-square is {statistic:.1f}, over {limit:.1f} with {freedom} degrees of freedom"
