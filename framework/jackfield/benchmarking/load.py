"""Requests under a load: when they are sent, and how many at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jackfield.benchmarking.arrivals import arrival_times
from jackfield.benchmarking.measure import Measurement, measure
from jackfield.benchmarking.prompts import Sample
from jackfield.benchmarking.requests import RequestPlan
from jackfield.client.wire import Wire
from jackfield.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How requests arrive.

    Args:
        rate: requests per second, or infinity. burstiness: see :func:`arrival_times`. concurrency: most requests at a
            time, or None. A request that is due and finds no place is sent as soon as there is one. timeout_s: one
            that takes longer has failed.

    Raises:
        ConfigError: the concurrency is below 1.
    """

    rate: float = float("inf")
    burstiness: float = 1.0
    concurrency: int | None = None
    seed: int = 0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        arrival_times(0, self.rate, self.burstiness, 0)
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(
                "must be at least 1",
                field="--max-concurrency",
                value=self.concurrency,
                remedy="raise it, or leave it out",
            )


@dataclass(slots=True)
class Outcome:
    """What came of a run.

    Args:
        measurements: of the requests that were sent, in the order of sending. planned: how many there should have
            been. duration_s: from the start to the last end. interrupted: the run was broken off.
    """

    planned: int
    measurements: list[Measurement] = field(default_factory=list)
    duration_s: float = 0.0
    interrupted: bool = False


async def run_load(
    wire: Wire,
    plan: RequestPlan,
    samples: Sequence[Sample],
    load: Load,
    on_end: Callable[[], object] = lambda: None,
) -> Outcome:
    """Send all samples and measure them. Cancelling it ends the requests under way, and what was measured so far is
    returned, marked as interrupted.

    Args:
        on_end: called when a request is over.
    """
    outcome, tasks, start = Outcome(len(samples)), set[asyncio.Task[None]](), time.perf_counter()
    try:
        await _send_all(wire, plan, samples, load, on_end, outcome, tasks, start)
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        outcome.interrupted = True
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    ends = [seen.ended for seen in outcome.measurements if seen.ended is not None]
    outcome.duration_s = time.perf_counter() - start if outcome.interrupted else max(ends, default=0.0)
    return outcome


async def _send_all(
    wire: Wire,
    plan: RequestPlan,
    samples: Sequence[Sample],
    load: Load,
    on_end: Callable[[], object],
    outcome: Outcome,
    tasks: set[asyncio.Task[None]],
    start: float,
) -> None:
    places = asyncio.Semaphore(load.concurrency or len(samples) or 1)

    async def one(sample: Sample, seen: Measurement) -> None:
        try:
            await measure(wire, plan.endpoint, plan.body(sample), seen, load.timeout_s)
        finally:
            places.release()
        on_end()

    times = arrival_times(len(samples), load.rate, load.burstiness, load.seed)
    for sample, due in zip(samples, times, strict=True):
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        await places.acquire()
        seen = Measurement(start, due)
        outcome.measurements.append(seen)
        tasks.add(asyncio.create_task(one(sample, seen)))
