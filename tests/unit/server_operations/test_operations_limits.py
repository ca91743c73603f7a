"""Limits on headers and bodies, told lengths and untold ones alike."""

from __future__ import annotations

import pytest
from asgi import Answer, Exchange, Stream, ask, echo, hello, run, with_calls
from starlette.types import Receive, Scope, Send

from jackfield.server.operations.limits import BodyLimit, HeaderLimit


def headers(count: int, size: int = 1) -> dict[str, str]:
    return {f"h{index:03}": "v" * size for index in range(count)}


def test_headers_up_to_the_limits_pass() -> None:
    app = HeaderLimit(hello, count=10, size=10 * (4 + 5))
    assert run(ask(app, headers=headers(10, 5))).status == 200


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (headers(11), "11 headers are too many; the limit is 10"),
        (headers(10, 6), "100 bytes of headers are too many; the limit is 90"),
    ],
)
def test_too_many_headers_are_refused(given: dict[str, str], message: str) -> None:
    answer = run(ask(HeaderLimit(hello, count=10, size=90), headers=given))
    assert (answer.status, answer.headers["connection"]) == (431, "close")
    assert answer.error() == {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": "headers_too_large",
    }


async def send_in_parts(app: BodyLimit, parts: list[bytes], given: dict[str, str] | None = None) -> Answer:
    wrapped, _ = with_calls(app)
    async with Exchange(wrapped, headers=given or {}, body=None) as exchange:
        for part in parts[:-1]:
            exchange.push(part)
        exchange.push(parts[-1], more=False)
        return await exchange.answer()


@pytest.mark.parametrize("told", [True, False])
def test_a_body_up_to_the_limit_passes(told: bool) -> None:
    parts = [b"a" * 4, b"b" * 6]
    answer = run(send_in_parts(BodyLimit(echo, 10), parts, {"content-length": "10"} if told else None))
    assert (answer.status, answer.body) == (200, b"aaaabbbbbb")


def test_a_told_length_is_refused_before_the_application_runs() -> None:
    async def never(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("the application must not run")

    answer = run(send_in_parts(BodyLimit(never, 10), [b""], {"content-length": "11"}))
    assert (answer.status, answer.headers["connection"]) == (413, "close")
    assert answer.error() == {
        "message": "the request body is too large; the limit is 10 bytes",
        "type": "invalid_request_error",
        "param": None,
        "code": "body_too_large",
    }


@pytest.mark.parametrize("parts", [[b"a" * 11], [b"a" * 4, b"b" * 4, b"c" * 4], [b"a"] * 11])
def test_an_untold_length_is_counted(parts: list[bytes]) -> None:
    answer = run(send_in_parts(BodyLimit(echo, 10), parts))
    assert (answer.status, answer.error()["code"]) == (413, "body_too_large")


def test_an_application_that_makes_its_own_error_of_it_does_not_answer() -> None:
    async def forgiving(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await echo(scope, receive, send)
        except Exception:
            await hello(scope, receive, send)

    answer = run(send_in_parts(BodyLimit(forgiving, 10), [b"a" * 11]))
    assert (answer.status, answer.error()["code"]) == (413, "body_too_large")


def test_the_shape_is_the_one_of_the_path() -> None:
    answer = run(ask(BodyLimit(echo, 10), "/v1/messages", headers={"content-length": "11"}))
    assert answer.error()["type"] == "request_too_large"


@pytest.mark.parametrize("told", [True, False])
def test_answers_stream_through_both_limits(told: bool) -> None:
    async def check() -> None:
        stream = Stream()
        app, _ = with_calls(HeaderLimit(BodyLimit(stream, 10), 10, 1000))
        async with Exchange(app, headers={"content-length": "0"} if told else {}) as exchange:
            start = await exchange.next()
            assert start is not None and start["status"] == 200
            for part in (b"data: 1\n\n", b"data: 2\n\n"):
                stream.chunks.put_nowait(part)
                assert await exchange.chunk() == part
            exchange.leave()
            await stream.ended.wait()
            assert stream.cancelled

    run(check())
