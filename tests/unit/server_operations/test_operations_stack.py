"""All layers together, in their order; and an engine that tells calls of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from asgi import Answer, Exchange, Stream, ask, echo, hello, run
from starlette.types import ASGIApp, Receive, Scope, Send

from jackfield.config import ServerSection
from jackfield.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jackfield.metrics import EngineMetrics
from jackfield.protocol import OutputKind, SamplingParams
from jackfield.server.engine_view import Engine
from jackfield.server.operations.calls import Call
from jackfield.server.operations.lifetime import Lifetimes
from jackfield.server.operations.observed_engine import observed
from jackfield.server.operations.prometheus import ServerMetrics
from jackfield.server.operations.stack import wrap

ORIGIN = "https://example.org"


def stack(app: ASGIApp, keys: tuple[str, ...] = ("sk-key",), **settings: Any) -> tuple[ASGIApp, list[Call]]:
    calls: list[Call] = []
    metrics = ServerMetrics(EngineMetrics, "tiny")
    section = ServerSection(**settings)
    wrapped = wrap(app, section, keys=keys, metrics=metrics, lifetimes=Lifetimes(), listeners=(calls.append,))
    return wrapped, calls


def with_key(**headers: str) -> dict[str, str]:
    return {"authorization": "Bearer sk-key", **headers}


def test_without_keys_all_is_open() -> None:
    assert run(ask(stack(hello, keys=())[0])).body == b"hello"


def test_a_preflight_needs_no_key() -> None:
    app, _ = stack(hello, allowed_origins=(ORIGIN,))
    asked = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    answer = run(ask(app, method="OPTIONS", headers=asked))
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "x-api-key" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers


def test_pages_of_other_origins_get_nothing() -> None:
    app, _ = stack(hello, allowed_origins=(ORIGIN,))
    answer = run(ask(app, headers=with_key(origin="https://evil.example")))
    assert "access-control-allow-origin" not in answer.headers


def test_refusals_can_be_read_by_pages() -> None:
    app, _ = stack(hello, allowed_origins=(ORIGIN,), allow_credentials=True)
    answer = run(ask(app, headers={"origin": ORIGIN}))
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, ORIGIN)
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_without_origins_there_is_no_cors() -> None:
    answer = run(ask(stack(hello)[0], headers=with_key(origin=ORIGIN)))
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"headers": {f"h{n}": "v" for n in range(6)}}, 431),
        ({"headers": {}}, 401),
        ({"headers": {"x-api-key": "sk-key", "content-length": "9"}}, 413),
        ({"headers": {"x-api-key": "sk-key"}, "body": b"123456789"}, 413),
        ({"headers": {"x-api-key": "sk-key"}, "body": b"12345678"}, 200),
    ],
)
def test_every_refusal_has_a_request_id_and_is_told(options: dict[str, Any], status: int) -> None:
    app, calls = stack(echo, max_header_count=5, max_body_bytes=8)
    answer: Answer = run(ask(app, **options))
    assert answer.status == status
    assert answer.headers["x-request-id"] == calls[0].request_id
    assert [call.final_status for call in calls] == [status]


def test_metrics_are_open_and_count_themselves_out() -> None:
    answer = run(ask(stack(hello)[0], "/metrics", method="GET"))
    assert answer.status == 200
    assert answer.body.startswith(b"# HELP jackfield:num_requests_running")


def test_streams_and_disconnects_pass_all_layers() -> None:
    async def check() -> list[Call]:
        stream = Stream()
        app, calls = stack(stream, allowed_origins=(ORIGIN,), request_timeout_s=30)
        async with Exchange(app, headers=with_key(origin=ORIGIN)) as exchange:
            await exchange.next()
            for part in (b"data: 1\n\n", b"data: 2\n\n"):
                stream.chunks.put_nowait(part)
                assert await exchange.chunk() == part
            exchange.leave()
            await asyncio.wait_for(stream.ended.wait(), 5)
            assert stream.cancelled
        return calls

    assert [(call.left, call.streams) for call in run(check())] == [(True, True)]


class FakeEngine:
    """Gives two outputs, and notes whether its stream was closed."""

    name = "fake"

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.closed = asyncio.Event()

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(max_tokens=7)

    async def generate(self, *words: Any, **options: Any) -> AsyncIterator[RequestOutput]:
        self.asked.append((words, options))
        try:
            for tokens, reason in (([1], None), ([2, 3], "length")):
                completion = CompletionOutput(0, token_ids=tokens, finish_reason=reason)
                times = RequestMetrics(1.0, 2.0, 3.0)
                yield RequestOutput("r", None, [9, 9], [completion], reason is not None, times)
        finally:
            self.closed.set()


def serve_with(engine: FakeEngine, params: SamplingParams | None, outputs: int) -> list[Call]:
    seen = observed(cast(Engine, engine))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        stream = seen.generate([9, 9], params, "r", priority=3)
        for _ in range(outputs):
            await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert engine.closed.is_set()
        await hello(scope, receive, send)

    wrapped, calls = stack(app, keys=())
    run(ask(wrapped))
    return calls


def test_a_call_knows_the_tokens_of_its_engine_requests() -> None:
    engine = FakeEngine()
    params = SamplingParams(max_tokens=5, output_kind=OutputKind.DELTA)
    (call,) = serve_with(engine, params, 2)
    assert engine.asked == [(([9, 9], params, "r"), {"priority": 3})]
    assert (call.prompt_tokens, call.generated, call.generations[0].max_tokens) == (2, 3, 5)
    assert call.generations[0].finish_reasons == {0: "length"}


def test_a_stream_that_is_left_is_closed_at_once() -> None:
    (call,) = serve_with(FakeEngine(), None, 1)
    assert (call.generated, call.generations[0].max_tokens) == (1, 7)


def test_everything_else_of_the_engine_is_as_it_is() -> None:
    assert observed(cast(Engine, FakeEngine())).name == "fake"  # type: ignore[attr-defined]


def test_requests_outside_of_calls_are_served_too() -> None:
    async def check() -> int:
        return len([output async for output in observed(cast(Engine, FakeEngine())).generate([9])])

    assert run(check()) == 2
