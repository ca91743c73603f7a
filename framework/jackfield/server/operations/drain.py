"""The end of a server: signals, the engine's death, and how running requests come to their end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from jackfield.server.engine_view import Engine
from jackfield.server.operations.lifetime import Lifetimes

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ENGINE_LOOK_SECONDS = 0.2
"""How often the engine is looked at."""
ANSWER_SECONDS = 5.0
"""How long requests may take to be answered after they were ended, or after the engine died."""
RETRY_SECONDS = 5.0
"""What clients that come too late are told to wait before they try again, elsewhere or here."""

_logger = logging.getLogger("jackfield.server")


class Outcome(Enum):
    """Why a server ended."""

    DRAINED = "drained"
    """It was told to, and running requests finished or had their time."""
    FORCED = "forced"
    """It was told twice."""
    ENGINE_DIED = "engine died"


class StopSignals:
    """Counts SIGTERM and SIGINT, in any mix: the first asks for an end, the second for one at once."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()

    def notice(self) -> None:
        """Take a signal."""
        (self.second if self.first.is_set() else self.first).set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen while the context lasts. Belongs to the event loop of the main thread."""
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            loop.add_signal_handler(number, self.notice)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
                # The loop leaves its own idea of a default, and not what was there: a program that was started in the
                # background may have been told to ignore interrupts.
                if before[number] is not None:
                    signal.signal(number, before[number])


async def first_of(*waits: Coroutine[Any, Any, object], timeout: float | None = None) -> int | None:
    """Return the place of the wait that ended first, or None after ``timeout`` seconds; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return next((place for place, task in enumerate(tasks) if task in done), None)
    finally:
        for task in tasks:
            task.cancel()


async def supervise(engine: Engine, lifetimes: Lifetimes, signals: StopSignals, drain_timeout_s: float) -> Outcome:
    """Wait until the server has to end and no request runs any more, and return why."""
    if await first_of(_death(engine), signals.first.wait()) == 0:
        return await _after_death(lifetimes)
    _logger.info("stopping: %d requests run and have %g s", lifetimes.running, drain_timeout_s)
    lifetimes.close("the server is shutting down", RETRY_SECONDS)
    waits = (lifetimes.wait_idle(), signals.second.wait(), _death(engine))
    match await first_of(*waits, timeout=drain_timeout_s):
        case 0:
            return Outcome.DRAINED
        case 1:
            await _cut(lifetimes)
            return Outcome.FORCED
        case 2:
            return await _after_death(lifetimes)
    await _cut(lifetimes)
    return Outcome.DRAINED


async def _cut(lifetimes: Lifetimes) -> None:
    number = lifetimes.cut("the server is shutting down and ended this request")
    _logger.warning("%d requests were ended before they finished", number)
    await first_of(lifetimes.wait_idle(), timeout=ANSWER_SECONDS)


async def _death(engine: Engine) -> None:
    while engine.is_running:
        await asyncio.sleep(ENGINE_LOOK_SECONDS)


async def _after_death(lifetimes: Lifetimes) -> Outcome:
    """Let requests be answered: all of them hear from the engine that it died."""
    _logger.error("the engine died; the server ends")
    await first_of(lifetimes.wait_idle(), timeout=ANSWER_SECONDS)
    return Outcome.ENGINE_DIED
