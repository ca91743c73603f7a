"""Observe: the outermost layer: request ids, and a Call that listeners (log, metrics, traces) hear of at the end."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jackfield.server.operations.calls import Call, Listener, current_call

ID_HEADER = "x-request-id"
SECOND_ID_HEADER = "request-id"
"""The name under which clients of the Anthropic API look for the same id."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_LONGEST_PATH = 256
_SOCKET_STATUS = {"websocket.accept": 101, "websocket.close": 403}
"""What a WebSocket's first message means in HTTP."""
_TRACE = ("traceparent", "tracestate")

_logger = logging.getLogger("jackfield.server")


class Observe:
    """Gives every request an id and a Call.

    A client's ``x-request-id`` is kept when it has at most 128 characters, all of them letters, digits or one of
    ``._:/-``; else a new one is made. The id is in the answer's headers, in ``request.state.request_id`` and in logs.

    Args:
        app: the next layer. listeners: told of each call when it is over; what one raises is logged.
        root_path: prefix under which a proxy publishes the server.
    """

    def __init__(self, app: ASGIApp, listeners: Sequence[Listener] = (), root_path: str = "") -> None:
        self._app, self._listeners, self._root = app, tuple(listeners), root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if self._root:
            scope["root_path"] = self._root
        call = begin(scope)
        scope["jackfield.call"] = call
        scope.setdefault("state", {})["request_id"] = call.request_id
        token = current_call.set(call)
        try:
            await self._app(scope, _watch_receive(call, receive), _watch_send(call, send))
        finally:
            current_call.reset(token)
            self._end(call, scope)

    def _end(self, call: Call, scope: Scope) -> None:
        call.duration = time.monotonic() - call.started
        call.route = call.route or str(getattr(scope.get("route"), "path", ""))
        for listener in self._listeners:
            try:
                listener(call)
            except Exception:
                _logger.exception("a listener of requests failed")


def begin(scope: Scope) -> Call:
    """Return the Call of a request that just came."""
    headers = Headers(scope=scope)
    given = headers.get(ID_HEADER, "")
    raw = scope.get("raw_path") or str(scope["path"]).encode("ascii", "backslashreplace")
    return Call(
        request_id=given if _ID.fullmatch(given) else uuid.uuid4().hex,
        method=scope.get("method", "WEBSOCKET"),
        path=raw[:_LONGEST_PATH].decode("ascii", "backslashreplace"),
        started=time.monotonic(),
        started_ns=time.time_ns(),
        client=(scope.get("client") or ("",))[0],
        trace={name: headers[name] for name in _TRACE if name in headers},
    )


def _watch_send(call: Call, send: Send) -> Send:
    async def watched(message: Message) -> None:
        if message["type"] == "http.response.body":
            call.complete = not message.get("more_body", False)
        elif message["type"] == "http.response.start":
            _note_start(call, message)
        elif message["type"] in _SOCKET_STATUS:
            call.status = call.status or _SOCKET_STATUS[message["type"]]
        await send(message)

    return watched


def _note_start(call: Call, message: Message) -> None:
    headers = MutableHeaders(scope=message)
    headers[ID_HEADER] = headers[SECOND_ID_HEADER] = call.request_id
    call.status = message["status"]
    with suppress(KeyError):
        call.streams = headers["content-type"].startswith("text/event-stream")


def _watch_receive(call: Call, receive: Receive) -> Receive:
    whole = False

    async def watched() -> Message:
        nonlocal whole
        call.reading = not whole
        message = await receive()
        if message["type"] == "http.disconnect" and not call.complete:
            call.left = True
        whole = whole or not message.get("more_body", False)
        call.reading = False if whole else call.reading
        return message

    return watched
