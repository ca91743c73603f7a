"""OpenTelemetry traces: one span for each request. Imported only when ``server.otlp_endpoint`` is set.

Attributes follow the semantic conventions for generative AI; latencies are ``gen_ai.latency.*``, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from jackfield import __version__
from jackfield.server.operations.calls import PROBES, Call, Generation

Attribute = str | int | float | bool | list[str]

FLUSH_MS = 5000
"""How long the end of the server waits for spans to be sent."""
_SERVER_ERROR = 500
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


class Tracing:
    """Makes spans of calls and sends them.

    Args:
        model: the name under which the model is served. exporter: where spans go.
    """

    def __init__(self, model: str, exporter: SpanExporter) -> None:
        self._model = model
        resource = Resource.create({"service.name": "jackfield", "service.version": __version__})
        # Of this server alone: a program around it may have tracing of its own.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jackfield.server", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, call: Call) -> None:
        """Make the span of a call that is over; probes have none. An incoming ``traceparent`` is its parent."""
        if call.path in PROBES:
            return
        name = f"{call.method} {call.route}" if call.route else call.method
        parent = self._propagator.extract(call.trace)
        attributes = {**_http(call), **dict(_gen_ai(call, self._model))}
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes=attributes, start_time=call.started_ns)
        if call.final_status >= _SERVER_ERROR:
            span.set_status(Status(StatusCode.ERROR))
        span.end(call.started_ns + int(call.duration * 1e9))

    def close(self) -> None:
        """Send what is left; waits at most :data:`FLUSH_MS`."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()


def to_endpoint(model: str, endpoint: str) -> Tracing:
    """Return tracing that sends to an OTLP collector over HTTP. Without a path, ``/v1/traces`` is added."""
    base = endpoint.rstrip("/")
    url = base if base.count("/") > 2 else f"{base}/v1/traces"
    return Tracing(model, OTLPSpanExporter(endpoint=url))


def _http(call: Call) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {
        "http.request.method": call.method,
        "http.response.status_code": call.final_status,
        "jackfield.request.id": call.request_id,
    }
    if call.route:
        found["http.route"] = call.route
    return found


def _gen_ai(call: Call, model: str) -> Iterator[tuple[str, Attribute]]:
    if not call.generations:
        return
    first = call.generations[0]
    yield "gen_ai.system", "jackfield"
    yield "gen_ai.operation.name", _OPERATIONS.get(call.route, "generate")
    yield "gen_ai.request.model", model
    yield "gen_ai.response.model", model
    yield "gen_ai.request.n", first.n
    yield "gen_ai.request.temperature", first.temperature
    yield "gen_ai.request.top_p", first.top_p
    if first.max_tokens is not None:
        yield "gen_ai.request.max_tokens", first.max_tokens
    yield "gen_ai.usage.input_tokens", call.prompt_tokens
    yield "gen_ai.usage.output_tokens", call.generated
    yield "gen_ai.usage.cached_tokens", sum(generation.cached_tokens for generation in call.generations)
    reasons = [reason for g in call.generations for _, reason in sorted(g.finish_reasons.items())]
    if reasons:
        yield "gen_ai.response.finish_reasons", reasons
    yield from _latencies(call.generations)


def _latencies(generations: list[Generation]) -> Iterator[tuple[str, Attribute]]:
    """Yield the times of a call: to the first token of all, and to the last one."""
    arrivals = [g.arrival for g in generations if g.arrival is not None]
    firsts = [g.first_token for g in generations if g.first_token is not None]
    lasts = [g.last_token for g in generations if g.last_token is not None]
    if firsts and lasts:
        yield "gen_ai.latency.time_to_first_token", min(firsts) - min(arrivals)
        yield "gen_ai.latency.e2e", max(lasts) - min(arrivals)
