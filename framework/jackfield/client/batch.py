"""Running a batch file against a server: bounded, resumable, each request once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from jackfield.client.batch_lines import BadLine, BatchRequest, answer_line, bad_line, failure_line, key_of, succeeded
from jackfield.client.batch_output import BatchOutput
from jackfield.client.connection import Connection
from jackfield.client.errors import BrokenAnswerError, UnreachableError, seconds

_BUSY = (429, 503)
_LONGEST_WAIT_S = 30.0


@dataclass(slots=True)
class Counts:
    """How a batch went: lines written for answers, lines written for failures, and lines that were there already."""

    succeeded: int = 0
    failed: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a request is tried again when the server is busy (429, 503) or the connection breaks, and how long to
    wait at first, in seconds; each further wait is twice as long, unless the server says how long.
    """

    count: int = 5
    first_wait_s: float = 0.5

    def wait_s(self, tried: int, told: float | None) -> float:
        """Return how long to wait after ``tried`` tries."""
        return min(_LONGEST_WAIT_S, self.first_wait_s * 2 ** (tried - 1) if told is None else told)


class BatchRun:
    """Sends the requests of a batch and writes their lines.

    Args:
        connection: to the server. output: where lines go. concurrency: most requests at a time. retries: of requests.
        on_line: called after each line, with the counts.
    """

    def __init__(
        self,
        connection: Connection,
        output: BatchOutput,
        *,
        concurrency: int,
        retries: Retries | None = None,
        on_line: Callable[[Counts], object] = lambda _: None,
    ) -> None:
        self._connection, self._output = connection, output
        self._concurrency = concurrency
        self._retries = retries or Retries()
        self._on_line = on_line
        self.counts = Counts()

    async def run(self, entries: Iterator[BatchRequest | BadLine]) -> None:
        """Run all entries that have no line in the output yet. Entries are taken as there is room for them.

        Raises:
            UnreachableError: the server is gone; what it did not answer has no line, and another run goes on there.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(self._work(entries))
        except ExceptionGroup as group_error:
            # One tells enough: the others are of workers that met the same.
            raise group_error.exceptions[0] from None

    async def _work(self, entries: Iterator[BatchRequest | BadLine]) -> None:
        for entry in entries:
            key = entry.custom_id if isinstance(entry, BatchRequest) else entry.line
            if key in self._output.done:
                self.counts.skipped += 1
                self._on_line(self.counts)
                continue
            self._write(bad_line(entry) if isinstance(entry, BadLine) else await self._send(entry))

    def _write(self, line: dict[str, Any]) -> None:
        self._output.write(line)
        assert key_of(line) is not None
        if succeeded(line):
            self.counts.succeeded += 1
        else:
            self.counts.failed += 1
        self._on_line(self.counts)

    async def _send(self, request: BatchRequest) -> dict[str, Any]:
        tried = 0
        while True:
            tried += 1
            last, told = tried > self._retries.count, None
            try:
                answer = await self._connection.answer(request.url, request.body)
                if answer.status_code not in _BUSY or last:
                    return answer_line(
                        request, answer.status_code, answer.headers.get("x-request-id"), _body(answer.content)
                    )
                told = seconds(answer.headers.get("retry-after"))
            except UnreachableError:
                if last:
                    raise
            except BrokenAnswerError as error:
                if last:
                    return failure_line(request, error.message)
            await asyncio.sleep(self._retries.wait_s(tried, told))


def _body(content: bytes) -> Mapping[str, Any] | Any:
    """Return the JSON of an answer, or its text where it is none."""
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        return content.decode(errors="replace")
