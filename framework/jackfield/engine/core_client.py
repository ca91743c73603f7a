"""CoreClient: starts an engine process and talks to it from an asyncio program."""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from jackfield.engine.core_process import ProcessSpec, run
from jackfield.engine.messages import (
    Abort,
    Add,
    Command,
    Failed,
    Notice,
    Pause,
    Paused,
    Ready,
    Stepped,
    Stop,
    decode_notice,
    encode,
)
from jackfield.engine.setup import Prepared
from jackfield.errors import EngineDeadError, PluginError
from jackfield.oracle.report import DecisionReport
from jackfield.protocol import EngineCoreOutput, EngineCoreRequest

STOP_SECONDS = 5.0
"""How long a process may take to stop before it is killed."""


class CoreClient:
    """One engine process. All methods belong to one event loop."""

    def __init__(self, prepared: Prepared) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="jackfield-"))
        self._context = zmq.asyncio.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._notices = self._context.socket(zmq.PULL)
        addresses = [f"ipc://{self._folder / name}" for name in ("commands", "notices")]
        for socket, address in zip((self._commands, self._notices), addresses, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
        self._manifest = prepared.manifest()
        bare = replace(prepared.resolution, report=DecisionReport())
        spec = ProcessSpec(bare, self._manifest, *addresses)
        # spawn: a forked child would inherit threads and device handles of this process.
        self.process = multiprocessing.get_context("spawn").Process(
            target=run, args=(spec,), name="jackfield-engine", daemon=True
        )
        self._closed = False
        self._answers: deque[asyncio.Future[None]] = deque()

    async def start(self) -> Ready:
        """Start the process and wait until it can serve.

        Raises:
            EngineDeadError: it did not come up. PluginError: it sees other plugin versions than this process.
        """
        await asyncio.to_thread(self.process.start)
        notice = await self._next()
        if isinstance(notice, Failed):
            self.close()
            raise EngineDeadError(f"the engine process did not start: {notice.error}")
        assert isinstance(notice, Ready), "the first notice says whether the process is up"
        if notice.digest != self._manifest.digest:
            self.close()
            raise PluginError(
                "the engine process loaded other plugins than were decided on",
                field="manifest",
                value=notice.digest,
                remedy=f"expected {self._manifest.digest}: reinstall the plugins and start again",
            )
        return notice

    async def add(self, requests: list[EngineCoreRequest]) -> None:
        """Queue requests."""
        await self._send(Add(requests))

    async def abort(self, request_ids: list[str]) -> None:
        """End requests."""
        if not self._closed:
            await self._send(Abort(request_ids))

    async def pause(self, on: bool) -> None:
        """Stop planning steps, or go on; returns when no step runs any more. Needs a reader of :meth:`outputs`.

        Raises:
            EngineDeadError: the process died before it answered.
        """
        answer = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        await self._send(Pause(on))
        await answer

    def give_up(self, error: EngineDeadError) -> None:
        """Fail those who wait for an answer."""
        while self._answers:
            answer = self._answers.popleft()
            if not answer.done():
                answer.set_exception(error)

    async def outputs(self) -> AsyncIterator[EngineCoreOutput]:
        """Yield what steps bring.

        Raises:
            EngineDeadError: the process failed or died.
        """
        while True:
            notice = await self._next()
            if isinstance(notice, Failed):
                raise EngineDeadError(f"the engine process stopped: {notice.error}")
            if isinstance(notice, Paused):
                self._answer()
            if isinstance(notice, Stepped):
                yield notice.output

    async def stop(self) -> None:
        """Ask the process to stop, and make sure that it does. Nothing of it is left afterwards."""
        if self._closed:
            return
        if self.process.is_alive():
            await self._send(Stop())
            await asyncio.to_thread(self.process.join, STOP_SECONDS)
        self.close()

    def close(self) -> None:
        """Kill the process if it lives, and remove sockets and files."""
        if self._closed:
            return
        self._closed = True
        if self.process.is_alive():
            self.process.kill()
        if self.process.pid is not None:
            self.process.join(STOP_SECONDS)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answer(self) -> None:
        """Wake the one who asked first; commands are answered in order."""
        answer = self._answers.popleft()
        if not answer.done():
            answer.set_result(None)

    async def _send(self, command: Command) -> None:
        await self._commands.send(encode(command))

    async def _next(self) -> Notice:
        """Return the next notice, or a Failed when the process is gone without one."""
        receiving = asyncio.ensure_future(self._notices.recv())
        while True:
            done, _ = await asyncio.wait({receiving}, timeout=0.2)
            if done:
                return decode_notice(receiving.result())
            if self.process.exitcode is not None and not await self._readable():
                receiving.cancel()
                return Failed(f"it ended with exit code {self.process.exitcode}")

    async def _readable(self) -> bool:
        found: Any = await self._notices.poll(0)
        return bool(found)
