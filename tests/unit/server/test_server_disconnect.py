"""Who leaves, or is cut off, frees the engine at once; speaks ASGI directly, since clients hide what happens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_engine import FakeEngine, make_app, say
from starlette.types import Message


class Connection:
    """One request to an app, whose client can leave."""

    def __init__(self, engine: FakeEngine, path: str, body: dict[str, Any]) -> None:
        self.app = make_app(engine)
        self.left = asyncio.Event()
        self.sent: list[Message] = []
        self.news = asyncio.Event()
        self._body: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode()}]
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
            "headers": [(b"content-type", b"application/json")],
        }

    async def run(self) -> None:
        await self.app(self._scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if self._body:
            return self._body.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        self.news.set()


class Hasty(Connection):
    """Leaves when it sees the status, before any event."""

    async def _send(self, message: Message) -> None:
        self.left.set()
        await asyncio.sleep(0.01)
        await super()._send(message)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


BODIES = [
    ("/v1/chat/completions", say(n=2, temperature=1)),
    ("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 1_000_000}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_u245_a_client_that_leaves_frees_everything(path: str, body: dict[str, Any], stream: bool) -> None:
    async def test() -> None:
        engine = FakeEngine("ab", forever=True, max_model_len=10_000_000)
        connection = Connection(engine, path, {**body, "stream": stream, "ignore_eos": True})
        task = asyncio.create_task(connection.run())
        jobs = 1 if "messages" in body else 3
        await until(lambda: len(engine.living) == jobs and (not stream or len(connection.sent) > 3))
        connection.left.set()
        await until(lambda: not engine.living)
        await task

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_handler_frees_everything(stream: bool) -> None:
    async def test() -> None:
        engine = FakeEngine("ab", forever=True, max_model_len=10_000_000)
        connection = Connection(engine, "/v1/completions", {**BODIES[1][1], "stream": stream, "ignore_eos": True})
        task = asyncio.create_task(connection.run())
        await until(lambda: len(engine.living) == 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not engine.living)

    run(test)


def test_one_wrong_prompt_ends_the_others() -> None:
    async def test() -> None:
        engine = FakeEngine("ab", forever=True, max_model_len=10_000_000)
        connection = Connection(engine, "/v1/completions", {"prompt": [[97], [999]], "max_tokens": 1_000_000})
        await connection.run()
        assert connection.sent[0]["status"] == 400
        await until(lambda: not engine.living)

    run(test)


def test_the_first_event_does_not_wait_for_the_last_token() -> None:
    async def test() -> None:
        engine = FakeEngine("ab", forever=True, max_model_len=10_000_000)
        connection = Connection(engine, "/v1/chat/completions", say(stream=True, ignore_eos=True))
        task = asyncio.create_task(connection.run())
        await connection.news.wait()
        assert engine.living and connection.sent[0]["status"] == 200
        connection.left.set()
        await task

    run(test)


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_client_that_leaves_before_the_first_event(path: str, body: dict[str, Any]) -> None:
    async def test() -> None:
        engine = FakeEngine("ab", forever=True, max_model_len=10_000_000)
        await Hasty(engine, path, {**body, "stream": True, "ignore_eos": True}).run()
        assert engine.prompts
        await until(lambda: not engine.living)

    run(test)
