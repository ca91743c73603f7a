"""Request ids, and what listeners hear of calls."""

from __future__ import annotations

import asyncio
import logging

import pytest
from asgi import Exchange, Stream, Stuck, ask, hello, run, with_calls
from fastapi import FastAPI, Request
from starlette.types import Receive, Scope, Send

from jackfield.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jackfield.protocol import OutputKind, SamplingParams
from jackfield.server.operations.calls import Call, Generation, current_call, route_path
from jackfield.server.operations.observe import Observe


@pytest.mark.parametrize("given", ["abc", "0123-4567.89_x:y/z", "a" * 128])
def test_a_good_request_id_is_kept(given: str) -> None:
    app, calls = with_calls(hello)
    answer = run(ask(app, headers={"X-Request-ID": given}))
    assert answer.headers["x-request-id"] == answer.headers["request-id"] == given
    assert [call.request_id for call in calls] == [given]


@pytest.mark.parametrize("given", [None, "", "a" * 129, "two words", "new\nline", "semi;colon", "-dash", '"quoted"'])
def test_any_other_request_id_is_replaced(given: str | None) -> None:
    app, calls = with_calls(hello)
    answer = run(ask(app, headers={} if given is None else {"x-request-id": given}))
    made = answer.headers["x-request-id"]
    assert len(made) == 32 and int(made, 16) >= 0
    assert calls[0].request_id == made


def test_the_id_is_in_the_state_of_the_request_and_in_the_context() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call.get()
        assert call is not None
        seen.append((scope["state"]["request_id"], call.request_id))
        await hello(scope, receive, send)

    run(ask(Observe(app), headers={"x-request-id": "one"}))
    assert seen == [("one", "one")]
    assert current_call.get() is None


def test_a_call_tells_route_status_and_time() -> None:
    api = FastAPI()

    @api.get("/v1/things/{name}")
    async def thing(name: str, request: Request) -> str:
        return f"{name} {request.state.request_id}"

    app, calls = with_calls(api)
    known = run(ask(app, "/v1/things/x", method="GET", headers={"x-request-id": "r1"}))
    run(ask(app, "/v1/nowhere", method="GET"))
    assert known.body == b'"x r1"'
    assert [(c.method, c.path, c.route, c.final_status) for c in calls] == [
        ("GET", "/v1/things/x", "/v1/things/{name}", 200),
        ("GET", "/v1/nowhere", "", 404),
    ]
    assert all(0 < call.duration < 5 and call.client == "192.0.2.1" and call.complete for call in calls)


def test_a_client_that_leaves_is_told_apart() -> None:
    async def check() -> list[Call]:
        stream = Stream()
        app, calls = with_calls(stream)
        async with Exchange(app) as exchange:
            await exchange.next()
            exchange.leave()
            await stream.ended.wait()
        return calls

    call = run(check())[0]
    assert (call.status, call.left, call.complete, call.streams) == (200, True, False, True)


def test_a_call_without_an_answer_has_a_status_for_logs() -> None:
    call = Call("id", "GET", "/", 0.0, 0)
    assert call.final_status == 500
    call.left = True
    assert call.final_status == 499


def test_chunks_pass_one_by_one() -> None:
    async def check() -> None:
        stream = Stream()
        app, _ = with_calls(stream)
        async with Exchange(app) as exchange:
            await exchange.next()
            for part in (b"one", b"two"):
                stream.chunks.put_nowait(part)
                assert await exchange.chunk() == part
                assert exchange.outbox.empty()
            stream.chunks.put_nowait(None)
            assert await exchange.chunk() == b""

    run(check())


def test_an_error_of_the_application_goes_on_and_is_told() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("broken")

    async def check() -> list[Call]:
        app, calls = with_calls(broken)
        exchange = Exchange(app)
        with pytest.raises(RuntimeError, match="broken"):
            await app(exchange.scope(), exchange.inbox.get, lambda message: exchange.outbox.put(message))
        return calls

    assert [call.final_status for call in run(check())] == [500]


def test_a_listener_that_fails_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def fail(call: Call) -> None:
        raise ValueError("listener")

    heard: list[Call] = []
    with caplog.at_level(logging.ERROR, "jackfield.server"):
        answer = run(ask(Observe(hello, (fail, heard.append))))
    assert (answer.status, len(heard)) == (200, 1)
    assert [record.message for record in caplog.records] == ["a listener of requests failed"]


@pytest.mark.parametrize(
    ("root", "path", "expected"),
    [
        ("", "/v1/x", "/v1/x"),
        ("/llm", "/llm/v1/x", "/v1/x"),
        ("/llm/", "/llm/v1/x", "/v1/x"),
        ("/llm", "/v1/x", "/v1/x"),
        ("/llm", "/llm", "/"),
        ("/llm", "/llmx/health", "/llmx/health"),
    ],
)
def test_the_path_below_a_prefix(root: str, path: str, expected: str) -> None:
    assert route_path({"path": path, "root_path": root}) == expected


def test_the_configured_prefix_reaches_the_application() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(route_path(scope))
        await hello(scope, receive, send)

    run(ask(Observe(app, root_path="/llm"), "/llm/health"))
    assert seen == ["/health"]


@pytest.mark.parametrize(("messages", "status"), [(["accept", "close"], 101), (["close"], 403)])
def test_a_web_socket_has_a_status_too(messages: list[str], status: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send({"type": f"websocket.{message}"})

    async def check() -> list[Call]:
        wrapped, calls = with_calls(app)
        exchange = Exchange(wrapped)
        scope = {**exchange.scope(), "type": "websocket"}
        del scope["method"]
        await wrapped(scope, exchange.inbox.get, exchange.outbox.put)
        return calls

    assert [(call.method, call.final_status) for call in run(check())] == [("WEBSOCKET", status)]


def test_lifespan_passes_through() -> None:
    async def check() -> bool:
        app, calls = with_calls(Stuck())
        exchange = Exchange(app)
        task = asyncio.ensure_future(app({"type": "lifespan"}, exchange.inbox.get, exchange.outbox.put))
        await asyncio.sleep(0)
        task.cancel()
        return calls == []

    assert run(check())


def output(kind: OutputKind, counts: list[tuple[int, int]], finished: str | None = None) -> RequestOutput:
    completions = [CompletionOutput(i, token_ids=[7] * n, finish_reason=finished) for i, n in counts]
    return RequestOutput("r", None, [1, 2, 3], completions, finished is not None, RequestMetrics(1.0, 2.0, 3.0), 2)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (OutputKind.DELTA, [[(0, 2)], [(1, 1), (0, 3)]]),
        (OutputKind.CUMULATIVE, [[(0, 2)], [(1, 1), (0, 5)]]),
        (OutputKind.FINAL_ONLY, [[(0, 5), (1, 1)]]),
    ],
)
def test_tokens_are_counted_for_every_kind_of_output(kind: OutputKind, parts: list[list[tuple[int, int]]]) -> None:
    generation = Generation.of(SamplingParams(n=2, max_tokens=9, output_kind=kind))
    for part in parts[:-1]:
        generation.note(output(kind, part))
    generation.note(output(kind, parts[-1], "stop"))
    assert (generation.n, generation.max_tokens, generation.generated, generation.prompt_tokens) == (2, 9, 6, 3)
    assert (generation.arrival, generation.first_token, generation.last_token) == (1.0, 2.0, 3.0)
    assert (generation.cached_tokens, generation.finish_reasons) == (2, {0: "stop", 1: "stop"})
