"""Metrics of several API processes before one engine, told as one: each keeps a file with its numbers up to date, and
the one that is asked adds them up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from jackfield.metrics import EngineMetrics, HistogramData

WRITE_SECONDS = 1.0
"""How old the numbers of other processes may be."""
_OF_ENGINE = frozenset(
    {
        "prefix_queries",
        "prefix_hits",
        "preemptions",
        "drafts_proposed",
        "drafts_accepted",
        "draft_rounds",
        "accepted_per_position",
        "running",
        "waiting",
        "free_blocks",
        "cache_usage",
    }
)
"""Fields that the engine tells every frontend alike; all others count what a frontend did itself."""


@dataclass(slots=True)
class Numbers:
    """What one process counted: the engine's figures as it sees them, its HTTP calls and what requests asked for."""

    engine: EngineMetrics
    params: dict[str, HistogramData] = field(default_factory=dict)
    calls: list[tuple[str, str, str, int]] = field(default_factory=list)
    seconds: list[tuple[str, str, HistogramData]] = field(default_factory=list)
    time: float = 0.0


class Exchange:
    """The files, in a folder that all processes of a server share.

    Args:
        folder: private to the server. number: of this process.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._own = folder, folder / f"metrics-{number}"

    def write(self, numbers: Numbers) -> None:
        """Tell the other processes this one's numbers."""
        draft = self._own.with_suffix(".new")
        draft.write_bytes(msgspec.msgpack.encode(numbers))
        draft.replace(self._own)

    def total(self) -> Numbers:
        """Return the numbers of all processes together."""
        return add_up(self._decode(path) for path in sorted(self._folder.glob("metrics-*")) if path.suffix != ".new")

    @contextlib.asynccontextmanager
    async def telling(self, numbers: Callable[[], Numbers]) -> AsyncIterator[None]:
        """Write what ``numbers`` returns again and again while the context lasts, and at its end."""

        async def repeat() -> None:
            while True:
                self.write(numbers())
                await asyncio.sleep(WRITE_SECONDS)

        task = asyncio.create_task(repeat(), name="jackfield-metrics")
        try:
            yield
        finally:
            task.cancel()
            self.write(numbers())

    @staticmethod
    def _decode(path: Path) -> Numbers:
        return msgspec.msgpack.decode(path.read_bytes(), type=Numbers)


def add_up(parts: Iterable[Numbers]) -> Numbers:
    """Return the sum: of what each process counted, and the latest of what the engine says."""
    rows = sorted(parts, key=lambda part: part.time)
    params: dict[str, HistogramData] = {}
    calls: Counter[tuple[str, str, str]] = Counter()
    seconds: dict[tuple[str, str], HistogramData] = {}
    for row in rows:
        for name, data in row.params.items():
            params[name] = _merge(params.get(name), data)
        for method, route, status, number in row.calls:
            calls[method, route, status] += number
        for method, route, data in row.seconds:
            seconds[method, route] = _merge(seconds.get((method, route)), data)
    return Numbers(
        _add_engines([row.engine for row in rows]),
        params,
        [(*key, number) for key, number in calls.items()],
        [(*pair, data) for pair, data in seconds.items()],
        rows[-1].time,
    )


def _add_engines(parts: list[EngineMetrics]) -> EngineMetrics:
    values: dict[str, Any] = {}
    for one in fields(EngineMetrics):
        several = [getattr(part, one.name) for part in parts]
        if one.name in _OF_ENGINE:
            values[one.name] = several[-1]
        elif one.name == "finished":
            values[one.name] = dict(sum((Counter(part) for part in several), Counter()))
        elif one.name == "histograms":
            values[one.name] = {name: _merge_all(part[name] for part in several) for name in several[-1]}
        else:
            values[one.name] = sum(several)
    # Tokens per step are the engine's: every frontend hears of every step.
    values["histograms"]["iteration_tokens_total"] = parts[-1].histograms["iteration_tokens_total"]
    return EngineMetrics(**values)


def _merge_all(parts: Iterable[HistogramData]) -> HistogramData:
    merged = None
    for part in parts:
        merged = _merge(merged, part)
    assert merged is not None, "there is always this process's own part"
    return merged


def _merge(first: HistogramData | None, second: HistogramData) -> HistogramData:
    if first is None:
        return second
    counts = tuple(a + b for a, b in zip(first.cumulative, second.cumulative, strict=True))
    return HistogramData(second.bounds, counts, first.total + second.total)
