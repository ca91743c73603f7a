"""The faults that the layers answer with, and how a layer answers."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from jackfield.server.errors import Fault, answer
from jackfield.server.operations.calls import route_path

CLOSE = {"connection": "close"}
"""Headers of an answer that leaves a part of the request unread."""


async def refuse(fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with a fault in the shape of its API; a WebSocket is closed before it opens."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": fault.message[:120]})
        return
    await answer(fault, route_path(scope))(scope, receive, send)
