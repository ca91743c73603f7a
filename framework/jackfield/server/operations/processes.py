"""Several API processes before one engine: they share the socket, and each has a seat at the engine.

The process that was started takes no requests: it loads the model, starts the others, passes signals on, and ends them
all when one of them or the engine dies.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from jackfield.config import EngineConfig
from jackfield.engine.async_llm import AsyncLLM
from jackfield.engine.core_client import CoreClient
from jackfield.engine.host import EngineHost, Seat
from jackfield.engine.parent import end_with_parent
from jackfield.engine.setup import Progress, prepare
from jackfield.errors import EngineDeadError
from jackfield.server.operations.drain import Outcome, StopSignals, first_of

LOOK_SECONDS = 0.1
"""How often the processes are looked at."""
GRACE_SECONDS = 15.0
"""How long an API process may take to end after the time that running requests have."""
ENGINE_DIED = 3
"""Exit code of an API process whose engine died."""

RunApi = Callable[[AsyncLLM, EngineConfig, socket.socket, Path, int], Outcome]

_logger = logging.getLogger("jackfield.server")


async def serve_many(config: EngineConfig, sock: socket.socket, signals: StopSignals, progress: Progress) -> Outcome:
    """Serve from ``server.api_processes`` processes until a signal comes.

    Args:
        config: as it was loaded. sock: bound. signals: that are listened to. progress: told of downloads.

    Raises:
        JackfieldError: the engine does not start. EngineDeadError: it or an API process died.
    """
    prepared = await asyncio.to_thread(lambda: prepare(None, config, {}, progress=progress))
    count = config.server.api_processes
    host = EngineHost(prepared, seats=count + 1)
    children: list[BaseProcess] = []
    try:
        await asyncio.to_thread(host.start)
        control = CoreClient(host.seat(count), host)
        try:
            if await first_of(_ready(control), signals.first.wait()) == 1:
                return Outcome.FORCED
            children += [_start(host.seat(number), config, sock, host.folder) for number in range(count)]
            _logger.info("%s; %d API processes", prepared.resolution.report.summary(), count)
            outcome = await _watch(host, children, signals, config.server.drain_timeout_s)
            await control.stop()
            await asyncio.to_thread(host.join)
        finally:
            control.close()
    finally:
        for child in children:
            child.kill()
        host.close()
    return outcome


async def _ready(control: CoreClient) -> None:
    await control.ready()


def _start(seat: Seat, config: EngineConfig, sock: socket.socket, folder: Path) -> BaseProcess:
    child = multiprocessing.get_context("spawn").Process(
        target=run_child, args=(seat, config, sock, folder), name=f"jackfield-api-{seat.number}", daemon=True
    )
    child.start()
    return child


def run_child(seat: Seat, config: EngineConfig, sock: socket.socket, folder: Path) -> None:
    """Take requests until told to stop. The entry point of an API process."""
    from jackfield.server.operations.run import serve_seat

    # A terminal signals all processes of its session; this one hears from the process that started it.
    os.setsid()
    end_with_parent()
    outcome = serve_seat(seat, config, sock, folder)
    sys.exit({Outcome.DRAINED: 0, Outcome.FORCED: 0, Outcome.ENGINE_DIED: ENGINE_DIED}[outcome])


async def _watch(host: EngineHost, children: list[BaseProcess], signals: StopSignals, drain_seconds: float) -> Outcome:
    """Wait until a signal comes or a process dies, and see all API processes to their end."""
    if await first_of(_one_died(host, children), signals.first.wait()) == 0:
        cause = _cause(host, children)
        _signal(children)
        await _all_ended(children, time.monotonic() + GRACE_SECONDS)
        raise cause
    _signal(children)
    deadline = time.monotonic() + drain_seconds + GRACE_SECONDS
    if await first_of(_all_ended(children, deadline), signals.second.wait()) == 1:
        _signal(children)
        await _all_ended(children, time.monotonic() + GRACE_SECONDS)
        return Outcome.FORCED
    return Outcome.DRAINED


async def _one_died(host: EngineHost, children: list[BaseProcess]) -> None:
    while host.lives() and all(child.is_alive() for child in children):
        await asyncio.sleep(LOOK_SECONDS)


async def _all_ended(children: list[BaseProcess], deadline: float) -> None:
    while any(child.is_alive() for child in children) and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_SECONDS)


def _cause(host: EngineHost, children: list[BaseProcess]) -> EngineDeadError:
    ended = [child for child in children if not child.is_alive() and child.exitcode != ENGINE_DIED]
    if host.lives() and ended:
        return EngineDeadError(f"API process {ended[0].name} ended with exit code {ended[0].exitcode}")
    return EngineDeadError(f"the engine process stopped: {host.end()}")


def _signal(children: list[BaseProcess]) -> None:
    for child in children:
        if child.is_alive() and child.pid is not None:
            os.kill(child.pid, signal.SIGTERM)
