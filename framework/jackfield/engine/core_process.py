"""The engine process: an EngineCore behind two sockets."""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from typing import Any

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
from jackfield.oracle.resolution import Resolution
from jackfield.registry import Manifest, Registry


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What an engine process is started with.

    Args:
        resolution: all decisions, with an empty report. manifest: the plugins behind them. commands, notices: addresses
            of the sockets.
    """

    resolution: Resolution
    manifest: Manifest
    commands: str
    notices: str


def run(spec: ProcessSpec) -> None:
    """Serve until told to stop. The entry point of the process."""
    # Ctrl-C in a terminal reaches all processes; the frontend decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context = zmq.Context()
    commands, notices = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.connect(spec.commands)
    notices.connect(spec.notices)
    try:
        _serve(spec, commands, notices)
    except Exception as error:
        notices.send(encode(Failed(f"{type(error).__name__}: {error}")))
    finally:
        context.destroy(linger=2000)


def _serve(spec: ProcessSpec, commands: Any, notices: Any) -> None:
    # Loading what the manifest names, and nothing else, proves that this process sees the same versions.
    registry = Registry.from_manifest(spec.manifest)
    digest = registry.manifest(registry.refs()).digest
    core = EngineCore(spec.resolution)
    free_blocks = core.scheduler.cache.pool.num_free
    notices.send(encode(Ready(digest, core.plan.max_model_len, core.plan.num_tokens, free_blocks)))
    with contextlib.closing(_Loop(core, commands, notices)) as loop:
        while loop.turn():
            pass


class _Loop:
    """Takes commands between steps; sleeps while there is nothing to do."""

    def __init__(self, core: EngineCore, commands: Any, notices: Any) -> None:
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
        if output.events or output.kv_events or not self._core.has_work():
            self._notices.send(encode(Stepped(output)))

    def _pause(self, on: bool) -> None:
        if on:
            self._core.pause()
            while self._core.has_work():
                self._step()
        else:
            self._core.resume()
        self._notices.send(encode(Paused(on)))

    def close(self) -> None:
        """Stop the workers."""
        self._core.shutdown()

    def _take(self, command: Command) -> bool:
        if isinstance(command, Add):
            for request in command.requests:
                self._core.add(request)
        elif isinstance(command, Abort):
            for request_id in command.request_ids:
                self._core.abort(request_id)
        elif isinstance(command, Pause):
            self._pause(command.on)
        return not isinstance(command, Stop)
