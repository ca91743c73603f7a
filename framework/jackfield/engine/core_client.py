"""CoreClient: talks to an engine process from an asyncio program."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Protocol

import zmq
import zmq.asyncio

from jackfield.engine.host import Seat
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
from jackfield.errors import EngineDeadError, PluginError, RequestError
from jackfield.protocol import EngineCoreOutput, EngineCoreRequest


class Host(Protocol):
    """The engine process, as far as a frontend knows it."""

    def lives(self) -> bool:
        """Return whether it runs."""
        ...

    def end(self) -> str:
        """Return how it ended, in words."""
        ...


class CoreClient:
    """One frontend of an engine process. All methods belong to one event loop.

    Args:
        seat: its place there. host: the process.
    """

    def __init__(self, seat: Seat, host: Host) -> None:
        self._seat, self._host = seat, host
        self._context = zmq.asyncio.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._notices = self._context.socket(zmq.PULL)
        for socket, address in ((self._commands, seat.commands), (self._notices, seat.notices)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
        self._closed = False
        self._answers: deque[asyncio.Future[None]] = deque()

    async def ready(self) -> Ready:
        """Wait until the process can serve.

        Raises:
            EngineDeadError: it did not come up. PluginError: it sees other plugin versions than were decided on.
        """
        notice = await self._next()
        if isinstance(notice, Failed):
            raise EngineDeadError(f"the engine process did not start: {notice.error}")
        assert isinstance(notice, Ready), "the first notice says whether the process is up"
        if notice.digest != self._seat.digest:
            raise PluginError(
                "the engine process loaded other plugins than were decided on",
                field="manifest",
                value=notice.digest,
                remedy=f"expected {self._seat.digest}: reinstall the plugins and start again",
            )
        return notice

    async def add(self, requests: list[EngineCoreRequest]) -> None:
        """Queue requests.

        Raises:
            RequestError: a request holds what no message can carry: half a character, a number of thousands of digits.
        """
        try:
            message = encode(Add(requests, self._seat.number))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(
                f"the request cannot be sent to the engine: {error}",
                field="sampling_params",
                value=requests[0].request_id,
                remedy="use whole characters, and numbers of 64 bits",
            ) from error
        await self._commands.send(message)

    async def abort(self, request_ids: list[str]) -> None:
        """End requests."""
        if not self._closed:
            await self._send(Abort(request_ids, self._seat.number))

    async def pause(self, on: bool) -> None:
        """Stop planning steps, or go on; returns when no step runs any more. Needs a reader of :meth:`outputs`.

        Raises:
            EngineDeadError: the process died before it answered.
        """
        answer = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        await self._send(Pause(on, self._seat.number))
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
        """Ask the process to stop."""
        if not self._closed and self._host.lives():
            await self._send(Stop())

    def close(self) -> None:
        """Close the sockets."""
        if not self._closed:
            self._closed = True
            self._context.destroy(linger=0)

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
            if not self._host.lives() and not await self._readable():
                receiving.cancel()
                return Failed(self._host.end())

    async def _readable(self) -> bool:
        found: Any = await self._notices.poll(0)
        return bool(found)
