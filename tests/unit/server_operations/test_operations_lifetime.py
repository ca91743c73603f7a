"""Request timeouts and the end of all requests."""

from __future__ import annotations

import asyncio
import json

import pytest
from asgi import Exchange, Stream, Stuck, ask, hello, run, with_calls
from starlette.types import ASGIApp, Receive, Scope, Send

from jackfield.server.operations.lifetime import Lifetime, Lifetimes


def limited(app: ASGIApp, limit: float | None = 0.05, lifetimes: Lifetimes | None = None) -> ASGIApp:
    return with_calls(Lifetime(app, lifetimes or Lifetimes(), limit))[0]


def test_a_request_in_time_is_not_touched() -> None:
    lifetimes = Lifetimes()
    assert run(ask(limited(hello, 5.0, lifetimes))).body == b"hello"
    assert lifetimes.running == 0


def test_a_request_without_an_answer_in_time_gets_504() -> None:
    stuck, lifetimes = Stuck(), Lifetimes()
    answer = run(ask(limited(stuck, lifetimes=lifetimes)))
    assert answer.status == 504
    assert answer.error() == {
        "message": "the request took longer than the 0.05 s that this server allows",
        "type": "timeout_error",
        "param": None,
        "code": "request_timeout",
    }
    assert stuck.cancelled
    assert lifetimes.running == 0


def test_the_shape_is_the_one_of_the_path() -> None:
    answer = run(ask(limited(Stuck()), "/v1/messages"))
    assert answer.error()["type"] == "timeout_error"


async def events_after_the_limit(path: str) -> tuple[list[bytes], Stream]:
    stream = Stream()
    async with Exchange(limited(stream), path) as exchange:
        stream.chunks.put_nowait(b"data: 1\n\n")
        await exchange.next()
        found = [await exchange.chunk(), await exchange.chunk()]
        assert await exchange.next() is None
        return found, stream


def test_a_stream_ends_with_an_event() -> None:
    found, stream = run(events_after_the_limit("/v1/chat/completions"))
    assert found[0] == b"data: 1\n\n"
    assert found[1].startswith(b"data: ") and found[1].endswith(b"\n\n")
    assert json.loads(found[1].removeprefix(b"data: "))["error"]["code"] == "request_timeout"
    assert stream.cancelled


def test_a_stream_of_messages_ends_with_an_event_of_that_name() -> None:
    found, _ = run(events_after_the_limit("/v1/messages"))
    assert found[1].startswith(b"event: error\ndata: ")


def test_any_other_answer_is_broken_off() -> None:
    async def check() -> BaseException | None:
        stream = Stream("text/plain")
        exchange = Exchange(limited(stream))
        await exchange.__aenter__()
        stream.chunks.put_nowait(b"part")
        await exchange.next()
        assert await exchange.chunk() == b"part"
        assert await exchange.next() is None
        assert exchange.task is not None
        return exchange.task.exception()

    error = run(check())
    assert type(error).__name__ == "BrokenOffError"
    assert str(error) == "the request took longer than the 0.05 s that this server allows"


def test_a_timeout_of_the_application_is_its_own() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

    async def check() -> None:
        app = limited(slow, 5.0)
        exchange = Exchange(app)
        with pytest.raises(TimeoutError):
            await app(exchange.scope(), exchange.inbox.get, exchange.outbox.put)

    run(check())


def test_nothing_is_sent_to_a_client_that_left() -> None:
    async def check() -> bool:
        stuck = Stuck()

        async def reads(scope: Scope, receive: Receive, send: Send) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            await stuck(scope, receive, send)

        async with Exchange(limited(reads)) as exchange:
            exchange.leave()
            return await exchange.next() is None and stuck.cancelled

    assert run(check())


def test_a_disconnect_reaches_the_application() -> None:
    async def check() -> bool:
        stream = Stream()
        async with Exchange(limited(stream, None)) as exchange:
            await exchange.next()
            exchange.leave()
            await asyncio.wait_for(stream.ended.wait(), 5)
            return stream.cancelled

    assert run(check())


def test_a_closed_server_refuses_new_requests_and_finishes_running_ones() -> None:
    async def check() -> None:
        stream, lifetimes, told = Stream(), Lifetimes(), []
        lifetimes.on_close(lambda: told.append("closed"))
        app = limited(stream, None, lifetimes)
        async with Exchange(app) as running:
            await running.next()
            lifetimes.close("the server is shutting down", 4.2)
            refused = await ask(app, "/v1/messages")
            assert (refused.status, refused.headers["retry-after"], refused.headers["connection"]) == (
                503,
                "5",
                "close",
            )
            assert refused.error() == {"type": "overloaded_error", "message": "the server is shutting down"}
            for probe in ("/health", "/ready", "/metrics"):
                assert (await ask(limited(hello, None, lifetimes), probe)).status == 200
            assert lifetimes.running == 1
            stream.chunks.put_nowait(b"data: rest\n\n")
            assert await running.chunk() == b"data: rest\n\n"
            stream.chunks.put_nowait(None)
            assert await running.chunk() == b""
            await asyncio.wait_for(lifetimes.wait_idle(), 5)
        assert told == ["closed"]

    run(check())


def test_cut_ends_requests_with_and_without_an_answer() -> None:
    async def check() -> None:
        stream, stuck, lifetimes = Stream(), Stuck(), Lifetimes()
        streaming = Exchange(limited(stream, None, lifetimes))
        waiting = Exchange(limited(stuck, 60.0, lifetimes))
        async with streaming, waiting:
            await streaming.next()
            await stuck.begun.wait()
            assert lifetimes.cut("the server ended this request") == 2
            assert b'"code":"shutting_down"' in await streaming.chunk()
            answer = await waiting.answer()
            assert (answer.status, answer.error()["message"]) == (503, "the server ended this request")
            await asyncio.wait_for(lifetimes.wait_idle(), 5)
            assert lifetimes.cut("again") == 0

    run(check())
