"""Runs requests on the engine for an HTTP request, and ends them at once when the client goes away.

A :class:`Generation` is closed by whoever started it: when the answer is complete, when the client closed the
connection, and when the handler is cancelled (by a time limit, for example). Closing aborts what still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request

from jackfield.engine.outputs import RequestOutput
from jackfield.errors import JackfieldError
from jackfield.protocol import SamplingParams
from jackfield.server.engine_view import Engine
from jackfield.server.errors import ClientGoneError

T = TypeVar("T")


class GenerationFailedError(JackfieldError):
    """The engine gave a request up because of an internal error; other requests go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request of the engine.

    Args:
        request_id: unique among living requests. prompt_ids: at least one. params: its ``output_kind`` decides what
            outputs hold. cache_salt: separates cached prefixes. priority: smaller runs earlier.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    priority: int = 0


@dataclass(slots=True)
class Usage:
    """Tokens of an HTTP request."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return usage as OpenAI's API writes it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


_Item = tuple[int, RequestOutput | BaseException | None]


class Generation:
    """Outputs of one or several engine requests, as they come.

    Args:
        engine: what runs them. jobs: at least one.

    Example:
        generation = await begin(engine, jobs, request)
        async for index, output in generation.outputs(): ...
        generation.close()
    """

    def __init__(self, engine: Engine, jobs: Sequence[Job]) -> None:
        self._engine = engine
        self._jobs = jobs
        self._items: asyncio.Queue[_Item] = asyncio.Queue()
        self._first: list[_Item] = []
        # Tasks of their own, so that a cancelled handler does not cancel the clean-up of engine requests with it.
        self._tasks = [asyncio.create_task(self._pump(index, job)) for index, job in enumerate(jobs)]

    async def start(self) -> None:
        """Wait for the first output, so that what is wrong with a request is known before the answer begins.

        Raises:
            RequestError, EngineDeadError: of any of the jobs.
        """
        item = await self._items.get()
        while not self._items.empty() and not isinstance(item[1], BaseException):
            self._first.append(item)
            item = self._items.get_nowait()
        self._first.append(item)
        _raise(item[1])

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield (index of the job, output) until all jobs are over.

        Raises:
            JackfieldError: a job failed; the others are ended.
        """
        living = len(self._jobs)
        while living:
            index, output = self._first.pop(0) if self._first else await self._items.get()
            if isinstance(output, BaseException):
                self.close()
                raise output
            if output is None:
                living -= 1
            else:
                _check(output)
                yield index, output

    def close(self) -> None:
        """End what still runs. May be called more than once."""
        for task in self._tasks:
            task.cancel()

    async def _pump(self, index: int, job: Job) -> None:
        prompt = {"prompt_token_ids": job.prompt_ids, "cache_salt": job.cache_salt}
        outputs = self._engine.generate(prompt, job.params, job.request_id, priority=job.priority)
        try:
            async for output in outputs:
                self._items.put_nowait((index, output))
            self._items.put_nowait((index, None))
        except Exception as error:
            self._items.put_nowait((index, error))
        finally:
            with suppress(Exception):
                await outputs.aclose()  # type: ignore[attr-defined]


async def begin(engine: Engine, jobs: Sequence[Job], request: Request) -> Generation:
    """Return a generation whose first output is there; whoever takes it must close it.

    Raises:
        ClientGoneError: the client left. RequestError, EngineDeadError: of any of the jobs; the others are ended.
    """
    generation = Generation(engine, jobs)
    try:
        await until_gone(request, generation.start())
    except BaseException:
        generation.close()
        raise
    return generation


async def collect(engine: Engine, jobs: Sequence[Job], request: Request) -> list[RequestOutput]:
    """Return the last output of each job.

    Raises:
        ClientGoneError: the client left. JackfieldError: a job failed; the others are ended.
    """
    generation = Generation(engine, jobs)
    try:
        return await until_gone(request, _last_outputs(generation, len(jobs)))
    finally:
        generation.close()


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns; it is cancelled when the client leaves.

    Raises:
        ClientGoneError: the client left first.
    """
    task, watch = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        watch.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _last_outputs(generation: Generation, count: int) -> list[RequestOutput]:
    found: dict[int, RequestOutput] = {}
    async for index, output in generation.outputs():
        found[index] = output
    return [found[index] for index in range(count)]


def _check(output: RequestOutput) -> None:
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise GenerationFailedError(f"the engine gave this request up: {completion.error or 'an internal error'}")


def _raise(outcome: object) -> None:
    if isinstance(outcome, BaseException):
        raise outcome
    if isinstance(outcome, RequestOutput):
        _check(outcome)
