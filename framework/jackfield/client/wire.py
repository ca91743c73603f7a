"""Streams over plain asyncio and h11, for measuring: a third of the processor time for each event that the general
client takes, and each event is timed when its bytes arrive.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from jackfield.client.address import Address
from jackfield.client.errors import BrokenAnswerError, answer_error, unreachable
from jackfield.client.events import DONE, Event, decode
from jackfield.client.lines import EventLines

if TYPE_CHECKING:
    import h11

CONNECT_SECONDS = 10.0
"""How long opening a connection may take."""

OnEvent = Callable[[Event, float], object]
"""Called with an event and when it arrived, on the clock of :func:`time.perf_counter`."""


class Wire:
    """Connections to one server, straight and without a proxy. They are kept open and used again. A context manager.

    Args:
        address: of the server. headers: of every request, besides host and length. tls: for encrypted connections.
    """

    def __init__(self, address: Address, headers: Mapping[str, str], tls: ssl.SSLContext | None = None) -> None:
        self._h11: Any = import_module("h11")
        self._address, self._tls = address, tls
        self._headers = [("host", address.authority), *headers.items()]
        self._idle: list[_Line] = []

    async def __aenter__(self) -> Wire:
        return self

    async def __aexit__(self, *_: object) -> None:
        for line in self._idle:
            line.close()

    async def stream(self, path: str, body: Any, on_event: OnEvent) -> None:
        """Send a JSON body and call ``on_event`` for each event of the streamed answer. Cancelling it breaks the
        request off.

        Raises:
            UnreachableError: nobody answers. AnswerError: the answer, or an event in it, is an error.
            BrokenAnswerError: the connection broke, or the stream ended before its end mark.
        """
        line = await self._line()
        data = msgspec.json.encode(body)
        try:
            await line.request(
                self._address.path + path, [*self._headers, ("content-length", str(len(data)))], data, on_event
            )
        except BaseException:
            line.close()
            raise
        if line.reusable:
            self._idle.append(line)

    async def _line(self) -> _Line:
        while self._idle:
            line = self._idle.pop()
            if line.reusable:
                return line
        address = self._address
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if address.socket is not None:
                    _, line = await loop.create_unix_connection(self._new, address.socket)
                else:
                    _, line = await loop.create_connection(self._new, address.host, address.port, ssl=self._tls)
        except OSError as error:  # TimeoutError is one too
            raise unreachable(error, address.base) from error
        return line

    def _new(self) -> _Line:
        return _Line(self._h11)


class _Line(asyncio.Protocol):
    """One connection: one request at a time."""

    def __init__(self, library: Any) -> None:
        self._h11 = library
        self._state: h11.Connection = library.Connection(library.CLIENT)
        self._transport: asyncio.Transport | None = None
        self._answer: _Answer | None = None

    @property
    def reusable(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing() and self._answer is None

    async def request(self, path: str, headers: list[tuple[str, str]], body: bytes, on_event: OnEvent) -> None:
        """Send a request and wait for the end of its answer."""
        h11 = self._h11
        if self._transport is None:
            raise BrokenAnswerError("the connection broke before the request was sent")
        answer = self._answer = _Answer(asyncio.get_running_loop().create_future(), on_event)
        parts = (h11.Request(method="POST", target=path, headers=headers), h11.Data(body), h11.EndOfMessage())
        self._transport.write(b"".join(self._state.send(part) or b"" for part in parts))
        await answer.over

    def close(self) -> None:
        """Break the connection off."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        now = time.perf_counter()
        try:
            self._state.receive_data(data)
            self._read(now)
        except Exception as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by asyncio. An answer whose length was not told ends with the connection."""
        self._transport = None
        if self._answer is None:
            return
        try:
            self._state.receive_data(b"")
            self._read(time.perf_counter())
        except Exception as end:
            self._fail(end)
        self._fail(error or ConnectionResetError("it was closed"))

    def _read(self, now: float) -> None:
        h11 = self._h11
        while self._answer is not None:
            event = self._state.next_event()
            if isinstance(event, h11.Data):
                self._answer.feed(bytes(event.data), now)
            elif isinstance(event, h11.Response):
                self._answer.begin(event)
            elif isinstance(event, h11.EndOfMessage):
                self._end()
            elif not isinstance(event, h11.InformationalResponse):
                return  # more data is needed, or there is nothing more

    def _end(self) -> None:
        """Finish the answer and make ready for another request."""
        answer, self._answer = self._answer, None
        assert answer is not None
        if self._state.our_state is self._state.their_state is self._h11.DONE:
            self._state.start_next_cycle()
        else:
            self.close()
        answer.end()

    def _fail(self, error: Exception) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            self.close()
            answer.fail(error, self._h11.ProtocolError)


class _Answer:
    """An answer as it comes. ``over`` is set at its end, to its error if there is one."""

    def __init__(self, over: asyncio.Future[None], on_event: OnEvent) -> None:
        self.over = over
        self._on_event = on_event
        self._lines = EventLines()
        self._status, self._retry_after = 0, None
        self._other: list[bytes] = []
        self._done = False

    def begin(self, response: Any) -> None:
        """Take the head of the answer."""
        self._status = response.status_code
        self._retry_after = next((v.decode("latin-1") for k, v in response.headers if k == b"retry-after"), None)

    def feed(self, data: bytes, now: float) -> None:
        """Take a piece of the body."""
        if self._status != 200:
            self._other.append(data)
            return
        for text in self._lines.feed(data):
            if text == DONE.encode():
                self._done = True
            elif not self._done:
                self._on_event(decode(text), now)

    def end(self) -> None:
        """Take the end of the body."""
        if self._status != 200:
            self._settle(answer_error(self._status, b"".join(self._other), self._retry_after))
        elif not self._done:
            self._settle(BrokenAnswerError("the stream ended before its end mark"))
        else:
            self._settle(None)

    def fail(self, error: Exception, protocol_error: type[Exception]) -> None:
        """Take what went wrong."""
        broke = isinstance(error, OSError | protocol_error)
        self._settle(BrokenAnswerError(f"the connection broke: {type(error).__name__}: {error}") if broke else error)

    def _settle(self, error: Exception | None) -> None:
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)
