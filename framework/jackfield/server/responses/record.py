"""A response under way: it writes its events down, for its own client and for those that ask later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec

from jackfield.engine.outputs import RequestOutput
from jackfield.errors import RequestError
from jackfield.server.generation import Generation
from jackfield.server.responses.answer import Answer
from jackfield.server.responses.events import EventWriter
from jackfield.server.responses.items import Item


class Record:
    """A response, what it answers, and its events.

    Args:
        answer: that grows. items: the input of the request. context: all items before the answer.
        background: goes on when its client leaves.
    """

    def __init__(self, answer: Answer, items: list[Item], context: list[Item], *, background: bool) -> None:
        self.answer, self.items, self.background = answer, items, background
        self.grown: Callable[[int], None] = lambda size: None
        """Told of bytes that the record grew by."""
        self.size = sum(len(msgspec.json.encode(part)) for part in (items, context, answer.response()))
        self._context = context
        self._events: list[bytes] = []
        self._first = 0
        self._places: dict[Follower, int] = {}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def context(self) -> list[Item]:
        """All items of the conversation, the answer included."""
        return [*self._context, self.answer.item()] if self.answer.text else self._context

    @property
    def streamed(self) -> bool:
        """Whether there are events."""
        return self._task is not None

    @property
    def over(self) -> bool:
        """Whether nothing comes any more."""
        return self.answer.over and (self._task is None or self._task.done())

    def complete(self, output: RequestOutput) -> None:
        """Take the whole answer at once; there are no events then."""
        self.answer.take(output)
        self._grow(len(msgspec.json.encode(self.answer.item())))

    def start(self, generation: Generation) -> None:
        """Write down what comes from now on."""
        writer = EventWriter(self.answer)
        self._add(writer.begin())
        self._task = asyncio.create_task(self._run(generation, writer), name=f"jackfield-{self.answer.id}")
        # A task that is cancelled before its first step does not come to any clean-up of its own.
        self._task.add_done_callback(partial(self._ended, generation))

    def follow(self, after: int = -1) -> Follower:
        """Return a reader of the events behind the one of that number.

        Raises:
            RequestError: they are no longer kept.
        """
        if after + 1 < self._first:
            raise RequestError(
                f"the events up to number {self._first - 1} are no longer kept",
                field="starting_after",
                value=after,
                remedy="ask for the response without a stream",
            )
        return Follower(self, after + 1)

    def stop(self) -> None:
        """End the response; one that is over stays as it is."""
        if self._task is not None:
            self._task.cancel()

    async def cancel(self) -> None:
        """As :meth:`stop`, and wait for the end."""
        self.stop()
        if self._task is not None:
            await asyncio.wait([self._task])

    def forget_events(self) -> int:
        """Let go of the events that nobody reads now, and return how many bytes they were."""
        keep = min([*self._places.values(), self._first + len(self._events)])
        count = max(0, keep - self._first)
        freed = sum(map(len, self._events[:count]))
        self._events, self._first = self._events[count:], self._first + count
        self.size -= freed
        return freed

    def read(self, place: int) -> list[bytes]:
        """Return the events from a number on."""
        return self._events[max(0, place - self._first) :]

    def placed(self, follower: Follower, place: int | None) -> None:
        """Note where a follower reads; None when it has left."""
        if place is None:
            self._places.pop(follower, None)
        else:
            self._places[follower] = place

    async def news(self) -> None:
        """Wait for an event, or for the end."""
        await self._news.wait()

    async def _run(self, generation: Generation, writer: EventWriter) -> None:
        try:
            async for _, output in generation.outputs():
                self._add(writer.step(output))
        except Exception as error:
            self.answer.fail(error)
            self._add(writer.failed())

    def _ended(self, generation: Generation, task: asyncio.Task[None]) -> None:
        generation.close()
        if not self.answer.over:
            self.answer.cancel()
        self._grow(len(msgspec.json.encode(self.answer.item())))
        self._tell()

    def _add(self, events: list[bytes]) -> None:
        if events:
            self._events += events
            self._grow(sum(map(len, events)))
            self._tell()

    def _grow(self, size: int) -> None:
        self.size += size
        self.grown(size)

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Follower:
    """Reads the events of a record as they come.

    Args:
        record: to read. place: number of the first event.
    """

    def __init__(self, record: Record, place: int) -> None:
        self._record, self._place = record, place
        record.placed(self, place)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield events until the response is over."""
        while True:
            events = self._record.read(self._place)
            if events:
                self._place += len(events)
                self._record.placed(self, self._place)
                yield b"".join(events)
            elif self._record.over:
                return
            else:
                await self._record.news()

    def close(self) -> None:
        """Read no more."""
        self._record.placed(self, None)
