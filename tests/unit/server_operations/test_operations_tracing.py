"""Spans of requests, with an exporter that keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from asgi import ask, hello, run, with_calls
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from jackfield.server.operations.calls import Call, Generation
from jackfield.server.operations.tracing import Tracing

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Traced:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing("tiny", self.exporter)

    def spans(self) -> Sequence[ReadableSpan]:
        self.tracing._provider.force_flush()
        return self.exporter.get_finished_spans()


@pytest.fixture
def traced() -> Iterator[Traced]:
    found = Traced()
    yield found
    found.tracing.close()


def generation(**values: object) -> Generation:
    found = Generation(2, 40, 0.5, 0.9)
    for name, value in values.items():
        setattr(found, name, value)
    return found


def test_a_request_is_a_span_with_attributes(traced: Traced) -> None:
    one = generation(
        prompt_tokens=10,
        cached_tokens=4,
        arrival=1.0,
        first_token=1.25,
        last_token=3.0,
        finish_reasons={1: "length", 0: "stop"},
        _counts={0: 3, 1: 40},
    )
    two = generation(prompt_tokens=5, arrival=1.0, first_token=2.0, last_token=5.0, _counts={0: 2})
    call = Call("r1", "POST", "/v1/chat/completions", 0.0, 1_000, route="/v1/chat/completions", status=200)
    call.duration, call.generations = 2.5, [one, two]
    traced.tracing.record(call)
    (span,) = traced.spans()
    assert (span.name, span.kind) == ("POST /v1/chat/completions", SpanKind.SERVER)
    assert (span.start_time, span.end_time) == (1_000, 2_500_001_000)
    assert span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "jackfield.request.id": "r1",
        "gen_ai.system": "jackfield",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 40,
        "gen_ai.usage.input_tokens": 15,
        "gen_ai.usage.output_tokens": 45,
        "gen_ai.usage.cached_tokens": 4,
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.latency.time_to_first_token": 0.25,
        "gen_ai.latency.e2e": 4.0,
    }


def test_a_parent_is_taken_in(traced: Traced) -> None:
    app, _ = with_calls(hello, traced.tracing.record)
    run(ask(app, headers={"traceparent": PARENT, "tracestate": "vendor=1"}))
    (span,) = traced.spans()
    assert span.parent is not None and span.context is not None
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert span.context.trace_state["vendor"] == "1"


def test_a_parent_that_did_not_sample_is_followed(traced: Traced) -> None:
    app, _ = with_calls(hello, traced.tracing.record)
    run(ask(app, headers={"traceparent": f"{PARENT[:-2]}00"}))
    assert traced.spans() == ()


@pytest.mark.parametrize("parent", ["", "nonsense", "00-0-0-01", f"{PARENT}-more"])
def test_a_wrong_parent_makes_a_new_trace(traced: Traced, parent: str) -> None:
    app, _ = with_calls(hello, traced.tracing.record)
    run(ask(app, headers={"traceparent": parent}))
    (span,) = traced.spans()
    assert span.parent is None


def test_probes_have_no_span_and_errors_are_marked(traced: Traced) -> None:
    traced.tracing.record(Call("r", "GET", "/health", 0.0, 0, status=200))
    traced.tracing.record(Call("r", "GET", "/v1/x", 0.0, 0, status=503))
    (span,) = traced.spans()
    assert (span.name, span.status.status_code) == ("GET", StatusCode.ERROR)
