"""Limits on what a request may bring."""

from __future__ import annotations

from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jackfield.server.errors import Fault
from jackfield.server.operations.calls import call_of
from jackfield.server.operations.faults import CLOSE, refuse


class HeaderLimit:
    """Refuses requests with too many headers, or with too many bytes of them, with 431.

    Args:
        count: most headers. size: most bytes of all names and values together.
    """

    def __init__(self, app: ASGIApp, count: int, size: int) -> None:
        self._app, self._count, self._size = app, count, size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = None if scope["type"] == "lifespan" else self._fault(scope["headers"])
        if fault is None:
            await self._app(scope, receive, send)
        else:
            await refuse(fault, scope, receive, send)

    def _fault(self, headers: list[tuple[bytes, bytes]]) -> Fault | None:
        if len(headers) > self._count:
            return _too_large(f"{len(headers)} headers are too many; the limit is {self._count}")
        size = sum(len(name) + len(value) for name, value in headers)
        if size > self._size:
            return _too_large(f"{size} bytes of headers are too many; the limit is {self._size}")
        return None


def _too_large(message: str) -> Fault:
    return Fault(431, message, code="headers_too_large", headers=CLOSE)


_ENCODED = Fault(
    415,
    "request bodies are taken as they are, without a content-encoding",
    code="unsupported_content_encoding",
    headers=CLOSE,
)


class BodyLimit:
    """Refuses bodies of more than ``size`` bytes with 413: by ``Content-Length`` before anything is read, and by
    counting where the length is not told. Compressed bodies, whose size nobody knows, are refused with 415.
    """

    def __init__(self, app: ASGIApp, size: int) -> None:
        self._app, self._size = app, size
        self._fault = Fault(
            413, f"the request body is too large; the limit is {size} bytes", code="body_too_large", headers=CLOSE
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        if headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            await refuse(_ENCODED, scope, receive, send)
        elif not length.isdecimal():
            await self._count(scope, receive, send)
        elif int(length) > self._size:
            await refuse(self._fault, scope, receive, send)
        else:
            # The HTTP parser sees to it that no more than this comes.
            await self._app(scope, receive, send)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        counter = _Counter(self._size, receive, send)
        with suppress(_TooMuchError):
            await self._app(scope, counter.receive, counter.send)
        if counter.exceeded and call_of(scope).status is None:
            await refuse(self._fault, scope, receive, send)


class _TooMuchError(Exception):
    """The body is larger than allowed."""


class _Counter:
    """Counts the bytes of a body. Once there are too many, the application can neither read on nor answer."""

    def __init__(self, size: int, receive: Receive, send: Send) -> None:
        self._left, self._receive, self._send = size, receive, send
        self.exceeded = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            self.exceeded = True
            raise _TooMuchError
        return message

    async def send(self, message: Message) -> None:
        if not self.exceeded:
            await self._send(message)
