"""One request, timed from the client's side."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from jackfield.client.errors import BrokenAnswerError
from jackfield.client.events import Event, Usage
from jackfield.client.wire import Wire
from jackfield.errors import JackfieldError


@dataclass(slots=True)
class Measurement:
    """What was seen of a request. Times are seconds.

    Args:
        start: of the run, on the clock of :func:`time.perf_counter`; ``due``, ``sent`` and ``ended`` count from it.
        due: when the request should have been sent. sent: when it was. ended: when it was over, or None while it goes
            on.
        ttft: from sending to the first output. e2el: from sending to the last output. gaps: between events with output
            (inter-token latencies). input_tokens, output_tokens: as the server counted them.
        error: why it failed, or "".
    """

    start: float
    due: float
    sent: float = 0.0
    ended: float | None = None
    ttft: float | None = None
    e2el: float | None = None
    gaps: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether the whole answer came."""
        return self.ended is not None and not self.error

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first one; None for answers of one token."""
        if self.ttft is None or self.e2el is None or self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)


async def measure(wire: Wire, path: str, body: dict[str, Any], seen: Measurement, timeout_s: float | None) -> None:
    """Send a request and write into ``seen`` what comes; errors of server and connection are written too.

    Args:
        seen: with the time of the start of the run, on the clock of :func:`time.perf_counter`.
        timeout_s: longest time for the whole answer.
    """
    begin = time.perf_counter()
    watch = _Watch(begin, seen)
    seen.sent = begin - seen.start
    try:
        async with asyncio.timeout(timeout_s):
            await wire.stream(path, body, watch.event)
        watch.finish()
    except JackfieldError as error:
        seen.error = error.message
    except TimeoutError:
        seen.error = f"no whole answer within {timeout_s:g} s"
    seen.ended = time.perf_counter() - seen.start


class _Watch:
    """Writes the times of events into a measurement."""

    def __init__(self, begin: float, seen: Measurement) -> None:
        self._begin = self._last = begin
        self._seen = seen
        self._usage: Usage | None = None

    def event(self, event: Event, now: float) -> None:
        """Take an event. It counts when it has output, or ends the answer, if only by a token without text."""
        seen = self._seen
        self._usage = event.usage or self._usage
        has_output = any(choice.has_output() for choice in event.choices)
        if not has_output and all(choice.finish_reason is None for choice in event.choices):
            return
        if seen.ttft is None:
            seen.ttft = now - self._begin
        elif has_output:
            seen.gaps.append(now - self._last)
        self._last, seen.e2el = now, now - self._begin

    def finish(self) -> None:
        """Take the end of the answer. Raises BrokenAnswerError when it does not tell what is needed."""
        if self._usage is None or self._seen.ttft is None:
            missing = "usage" if self._usage is None else "output"
            raise BrokenAnswerError(f"the stream held no {missing}, so that nothing can be said of its tokens")
        self._seen.input_tokens = self._usage.prompt_tokens
        self._seen.output_tokens = self._usage.completion_tokens
