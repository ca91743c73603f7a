"""How long recorded steps take, by their number of sequences."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from jackfield.protocol import Recordings
from jackfield.worker.graphs import DecodeGraphs
from jackfield.worker.rounds import RoundGraphs

REPLAYS = 3
"""Of each recording, that are timed."""


def recorded_seconds(
    graphs: DecodeGraphs, rounds: RoundGraphs, wait: Callable[[], None], *, followed: bool
) -> Recordings:
    """Return what decode steps and rounds take, of rows that are no sequences: attention to a context comes on top, in
    both.

    Args:
        wait: returns once the device has done what it was given. followed: as in :class:`Recordings`.
    """
    return Recordings(
        {size: _seconds(partial(graphs.replay_once, size), wait) for size in graphs.sizes},
        {size: _seconds(partial(rounds.replay_once, size), wait) for size in rounds.sizes},
        drafts=rounds.drafts,
        followed=followed,
    )


def _seconds(replay: Callable[[], None], wait: Callable[[], None]) -> float:
    replay()
    wait()
    began = time.perf_counter()
    for _ in range(REPLAYS):
        replay()
    wait()
    return (time.perf_counter() - began) / REPLAYS
