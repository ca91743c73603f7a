"""How long requests live: the request timeout, and their end when the server stops."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from jackfield.server.errors import Fault, shape_of
from jackfield.server.operations.calls import PROBES, call_of, route_path
from jackfield.server.operations.faults import CLOSE, refuse

SEND_SECONDS = 2.0
"""How long the end of a stream may take to be sent to a client that does not read."""


class Lifetimes:
    """The requests that run now, and whether new ones may begin."""

    def __init__(self) -> None:
        self._timers: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.refusal: Fault | None = None
        self._ending: Fault | None = None
        self._on_close: list[Callable[[], None]] = []

    @property
    def running(self) -> int:
        """How many requests run."""
        return len(self._timers)

    @property
    def ending(self) -> Fault | None:
        """Why running requests are ended, or None while they are not."""
        return self._ending

    def on_close(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` when new requests are refused from then on."""
        self._on_close.append(listener)

    def close(self, message: str, retry_after_s: float) -> None:
        """Refuse new requests from now on, with 503 and ``Retry-After``. Probes are answered to the end; `/ready` says
        itself that nothing more is taken.
        """
        seconds = str(max(1, math.ceil(retry_after_s)))
        headers = {**CLOSE, "retry-after": seconds}
        self.refusal = Fault(503, message, "service_unavailable", code="shutting_down", headers=headers)
        for listener in self._on_close:
            listener()

    def cut(self, message: str) -> int:
        """End all running requests now, and return how many they were."""
        self._ending = Fault(503, message, "service_unavailable", code="shutting_down", headers=CLOSE)
        living = [timer for timer in self._timers if not timer.expired()]
        for timer in living:
            timer.reschedule(asyncio.get_running_loop().time())
        return len(living)

    async def wait_idle(self) -> None:
        """Wait until no request runs."""
        await self._idle.wait()

    @contextmanager
    def living(self, timer: asyncio.Timeout) -> Iterator[None]:
        """Count a request, which ends when ``timer`` expires."""
        self._timers.add(timer)
        self._idle.clear()
        try:
            yield
        finally:
            self._timers.discard(timer)
            if not self._timers:
                self._idle.set()


class Lifetime:
    """Ends requests that take too long, and all of them when the server stops. One that was not answered yet gets 504
    (503 when the server stops, 408 when its body has not come to the end); a stream of events gets a last event with
    the error; any other answer is broken off. The application is cancelled first, so that what it holds, its engine
    requests included, is free.

    Args:
        lifetimes: the requests that run. limit: longest time in seconds, or None.
    """

    def __init__(self, app: ASGIApp, lifetimes: Lifetimes, limit: float | None) -> None:
        self._app, self._lifetimes, self._limit = app, lifetimes, limit
        text = f"the request took longer than the {limit:g} s that this server allows" if limit else ""
        self._too_long = Fault(504, text, "timeout_error", code="request_timeout", headers=CLOSE)
        late = f"the body of the request did not come within the {limit:g} s that this server allows" if limit else ""
        self._too_slow = Fault(408, late, "timeout_error", code="request_timeout", headers=CLOSE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or route_path(scope) in PROBES:
            await self._app(scope, receive, send)
        elif self._lifetimes.refusal is not None:
            await refuse(self._lifetimes.refusal, scope, receive, send)
        else:
            await self._run(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        timer = asyncio.timeout(self._limit if scope["type"] == "http" else None)
        try:
            async with timer:
                with self._lifetimes.living(timer):
                    await self._app(scope, receive, send)
        except TimeoutError:
            if not timer.expired():
                raise
            await self._end(scope, receive, send)

    async def _end(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = call_of(scope)
        fault = self._lifetimes.ending or (self._too_slow if call.reading else self._too_long)
        if call.complete or call.left:
            return
        if call.status is None or scope["type"] == "websocket":
            await refuse(fault, scope, receive, send)
        elif call.streams:
            last = shape_of(route_path(scope)).event(fault)
            with suppress(TimeoutError):
                async with asyncio.timeout(SEND_SECONDS):
                    await send({"type": "http.response.body", "body": last, "more_body": False})
        else:
            raise BrokenOffError(fault.message)


class BrokenOffError(Exception):
    """An answer that had begun cannot be finished; the connection is closed."""
