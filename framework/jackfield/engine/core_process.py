"""The engine process: an EngineCore behind two sockets."""

from __future__ import annotations

import contextlib
import gc
import signal
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from jackfield.engine.core import EngineCore
from jackfield.engine.messages import (
    Abort,
    Add,
    Command,
    Failed,
    Pause,
    Paused,
    Ready,
    Stepped,
    Stop,
    decode_command,
    encode,
)
from jackfield.engine.parent import end_with_parent
from jackfield.oracle.resolution import Resolution
from jackfield.protocol import CoreEvent
from jackfield.registry import Manifest, Registry

SEAT_MARK = "\x1f"
"""Between a seat's number and the name that its frontend gave a request."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What an engine process is started with.

    Args:
        resolution: all decisions, with an empty report. manifest: the plugins behind them. seats: for each frontend the
            addresses for its commands and for notices to it.
    """

    resolution: Resolution
    manifest: Manifest
    seats: tuple[tuple[str, str], ...]


def run(spec: ProcessSpec) -> None:
    """Serve until told to stop. The entry point of the process."""
    # A terminal or a supervisor signals all processes; the frontend decides what it means.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    context = zmq.Context()
    commands = context.socket(zmq.PULL)
    notices = [context.socket(zmq.PUSH) for _ in spec.seats]
    for (command_address, notice_address), notice in zip(spec.seats, notices, strict=True):
        commands.connect(command_address)
        notice.connect(notice_address)
    try:
        _serve(spec, commands, notices)
    except Exception as error:
        failed = encode(Failed(f"{type(error).__name__}: {error}"))
        for notice in notices:
            notice.send(failed)
    finally:
        context.destroy(linger=2000)


def _serve(spec: ProcessSpec, commands: Any, notices: list[Any]) -> None:
    # Loading what the manifest names, and nothing else, proves that this process sees the same versions.
    registry = Registry.from_manifest(spec.manifest)
    digest = registry.manifest(registry.refs()).digest
    core = EngineCore(spec.resolution)
    # What was made until now lives as long as this process: the collector of cycles need not look at all of it again in
    # the middle of a step.
    gc.collect()
    gc.freeze()
    free_blocks = core.scheduler.cache.pool.num_free
    ready = encode(Ready(digest, core.plan.max_model_len, core.plan.num_tokens, free_blocks))
    for notice in notices:
        notice.send(ready)
    with contextlib.closing(_Loop(core, commands, notices)) as loop:
        while loop.turn():
            pass


class _Loop:
    """Takes commands between steps; sleeps while there is nothing to do.

    Frontends name requests as they like: behind the seat's number names are unique.
    """

    def __init__(self, core: EngineCore, commands: Any, notices: list[Any]) -> None:
        self._core, self._commands, self._notices = core, commands, notices

    def turn(self) -> bool:
        """Take waiting commands and make a step; returns False when told to stop."""
        while not self._core.has_work() or self._commands.poll(0):
            if not self._take(decode_command(self._commands.recv())):
                return False
        self._step()
        return True

    def _step(self) -> None:
        output = self._core.step()
        # The step after which nothing is left to do is told for its counters.
        idle = not self._core.has_work()
        if len(self._notices) == 1:
            if output.events or output.kv_events or output.tokens or idle:
                self._notices[0].send(encode(Stepped(output)))
            return
        events: list[list[CoreEvent]] = [[] for _ in self._notices]
        for event in output.events:
            seat, _, event.request_id = event.request_id.partition(SEAT_MARK)
            events[int(seat)].append(event)
        for seat_number, (notice, own) in enumerate(zip(self._notices, events, strict=True)):
            kv_events = [] if seat_number else output.kv_events
            if own or kv_events or output.tokens or idle:
                part = msgspec.structs.replace(output, events=own, kv_events=kv_events)
                notice.send(encode(Stepped(part)))

    def _name(self, seat: int, request_id: str) -> str:
        return request_id if len(self._notices) == 1 else f"{seat}{SEAT_MARK}{request_id}"

    def _pause(self, on: bool, seat: int) -> None:
        if on:
            self._core.pause()
            while self._core.has_work():
                self._step()
        else:
            self._core.resume()
        self._notices[seat].send(encode(Paused(on)))

    def close(self) -> None:
        """Stop the workers."""
        self._core.shutdown()

    def _take(self, command: Command) -> bool:
        if isinstance(command, Add):
            for request in command.requests:
                request.request_id = self._name(command.seat, request.request_id)
                self._core.add(request)
        elif isinstance(command, Abort):
            for request_id in command.request_ids:
                self._core.abort(self._name(command.seat, request_id))
        elif isinstance(command, Pause):
            self._pause(command.on, command.seat)
        return not isinstance(command, Stop)
