"""A client that speaks ASGI to an application message by message, and small applications."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jackfield.server.operations.calls import Call, Listener
from jackfield.server.operations.observe import Observe

T = TypeVar("T")
PATIENCE = 5.0


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


@dataclass(slots=True)
class Exchange:
    """One request. ``body`` is a whole body; None leaves it to :meth:`push`."""

    app: ASGIApp
    path: str = "/v1/things"
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = b""
    extra: Mapping[str, Any] = field(default_factory=dict)
    inbox: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    outbox: asyncio.Queue[Message | None] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Exchange:
        if self.body is not None:
            self.push(self.body, more=False)
        self.task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.task is not None
        self.leave()
        await asyncio.wait([self.task], timeout=PATIENCE)
        assert self.task.done(), "the application did not end after the client left"

    def push(self, body: bytes, *, more: bool = True) -> None:
        self.inbox.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self.inbox.put_nowait({"type": "http.disconnect"})

    async def next(self) -> Message | None:
        """Return the next message of the application, or None after the last one."""
        return await asyncio.wait_for(self.outbox.get(), PATIENCE)

    async def chunk(self) -> bytes:
        message = await self.next()
        assert message is not None and message["type"] == "http.response.body", message
        return bytes(message.get("body", b""))

    async def answer(self) -> Answer:
        start = await self.next()
        assert start is not None and start["type"] == "http.response.start", start
        body = b""
        while (message := await self.next()) is not None:
            body += message.get("body", b"")
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return Answer(start["status"], headers, body)

    def scope(self) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in self.headers.items()],
            "client": ("192.0.2.1", 1234),
            "server": ("test", 80),
            "state": {},
            **self.extra,
        }

    async def _run(self) -> None:
        async def send(message: Message) -> None:
            self.outbox.put_nowait(message)

        try:
            await self.app(self.scope(), self.inbox.get, send)
        finally:
            self.outbox.put_nowait(None)


async def ask(app: ASGIApp, path: str = "/v1/things", **options: Any) -> Answer:
    async with Exchange(app, path, **options) as exchange:
        return await exchange.answer()


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("hello")(scope, receive, send)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body of the request."""
    body = await Request(scope, receive).body()
    await PlainTextResponse(body)(scope, receive, send)


class Stream:
    """An application that sends what the test puts into ``chunks``, until None, as server-sent events."""

    def __init__(self, media_type: str = "text/event-stream") -> None:
        self.chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.cancelled = False
        self._media_type = media_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def parts() -> Any:
            try:
                while (chunk := await self.chunks.get()) is not None:
                    yield chunk
            except asyncio.CancelledError:
                self.cancelled = True
                raise
            finally:
                self.ended.set()

        await StreamingResponse(parts(), media_type=self._media_type)(scope, receive, send)


class Stuck:
    """An application that answers never; it notes that it was cancelled."""

    def __init__(self) -> None:
        self.begun, self.cancelled = asyncio.Event(), False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


def with_calls(app: ASGIApp, *listeners: Listener) -> tuple[ASGIApp, list[Call]]:
    """Return ``app`` below the outermost layer, and the calls that are over."""
    calls: list[Call] = []
    return Observe(app, (calls.append, *listeners)), calls
