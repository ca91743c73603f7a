"""Server-sent events, encoded by hand: one ``data:`` line of JSON for each event."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
"""What ends a stream of OpenAI's API."""

_encoder = msgspec.json.Encoder()
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def event(data: Any) -> bytes:
    """Return a nameless event that holds ``data`` as JSON."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


def named_event(name: str, data: Any) -> bytes:
    """Return an event with a name that holds ``data`` as JSON."""
    return b"event: " + name.encode() + b"\n" + event(data)


class EventStream(StreamingResponse):
    """A streamed answer; proxies are asked not to hold events back.

    Args:
        events: encoded. headers: further ones. close: called when the answer is over, however it ends: a client can
            leave before the first event is asked for.
    """

    def __init__(self, events: AsyncIterator[bytes], headers: Mapping[str, str], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={**_HEADERS, **headers})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
