"""Which pieces of text make a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

ROWS = 128
"""Most pieces of a step."""
WINDOW = 512
"""Pieces that are sorted by length before they are put together, so that little is padded."""

Batch = npt.NDArray[np.int64]
"""Indices of pieces."""


def batches(lengths: Sequence[int], budget: int, order: Sequence[int]) -> list[Batch]:
    """Return batches of at most ``budget`` tokens, padding included. Pieces are taken in ``order``, but for windows
    inside which alike lengths come together.
    """
    made: list[Batch] = []
    for start in range(0, len(order), WINDOW):
        window = sorted(order[start : start + WINDOW], key=lambda at: lengths[at])
        batch: list[int] = []
        for at in window:
            # Lengths rise, so that the newcomer is the longest.
            if batch and (lengths[at] * (len(batch) + 1) > budget or len(batch) == ROWS):
                made.append(np.array(batch))
                batch = []
            batch.append(at)
        made.append(np.array(batch))
    return made


def shuffled(lengths: Sequence[int], budget: int, seed: int) -> Iterator[list[Batch]]:
    """Yield the batches of one epoch after another, each in an order of its own."""
    random = np.random.default_rng(seed)
    while True:
        made = batches(lengths, budget, random.permutation(len(lengths)).tolist())
        yield [made[at] for at in random.permutation(len(made))]


def plan(lengths: Sequence[int], budget: int, seed: int, steps: int | None, epochs: int) -> list[Batch]:
    """Return the batches of all steps: ``steps`` of them, or those of ``epochs``."""
    found: list[Batch] = []
    for number, epoch in enumerate(shuffled(lengths, budget, seed)):
        if len(found) >= steps if steps is not None else number == epochs:
            break
        found += epoch
    return found[:steps]
