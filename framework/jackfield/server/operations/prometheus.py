"""``GET /metrics``: what the engine and the server did, in the text format of Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from jackfield.metrics import EngineMetrics, Histogram, HistogramData
from jackfield.metrics.histogram import COUNTS, FEW, SECONDS
from jackfield.server.operations.calls import Call, call_of, route_path
from jackfield.server.operations.exchange import Exchange, Numbers

PREFIX, VLLM_PREFIX = "jackfield:", "vllm:"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "WEBSOCKET"})
_REASONS = ("stop", "length", "abort", "error")
Read = Callable[[EngineMetrics], float]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of the engine: name without prefix, help, and where it is."""

    name: str
    help: str
    read: Read


GAUGES = (
    Figure("num_requests_running", "Sequences that hold a place in the batch.", lambda m: m.running),
    Figure("num_requests_waiting", "Sequences that wait for a place.", lambda m: m.waiting),
    Figure("kv_cache_usage_perc", "Part of the KV cache's blocks in use, 0 to 1.", lambda m: m.cache_usage),
)
COUNTERS = (
    Figure("prompt_tokens", "Prompt tokens of finished requests.", lambda m: m.prompt_tokens),
    Figure("prompt_tokens_cached", "Those that the prefix cache had.", lambda m: m.cached_prompt_tokens),
    Figure("generation_tokens", "Sampled tokens.", lambda m: m.generation_tokens),
    Figure("prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda m: m.prefix_queries),
    Figure("prefix_cache_hits", "Tokens found in the prefix cache.", lambda m: m.prefix_hits),
    Figure("num_preemptions", "Running sequences that lost their place.", lambda m: m.preemptions),
    Figure("spec_decode_num_drafts", "How often drafts of a sequence were verified.", lambda m: m.draft_rounds),
    Figure("spec_decode_num_draft_tokens", "Draft tokens that were verified.", lambda m: m.drafts_proposed),
    Figure("spec_decode_num_accepted_tokens", "Draft tokens that were kept.", lambda m: m.drafts_accepted),
)
HISTOGRAMS = {
    "time_to_first_token_seconds": "Time from a request's arrival to its first token.",
    "inter_token_latency_seconds": "Time between outputs of a sequence.",
    "request_time_per_output_token_seconds": "Mean time per token after the first, of each sequence.",
    "e2e_request_latency_seconds": "Time from a request's arrival to its last token.",
    "request_queue_time_seconds": "Time from a request's arrival to its first step.",
    "request_prefill_time_seconds": "Time from a request's first step to its first token.",
    "request_decode_time_seconds": "Time from a request's first token to its last.",
    "request_prompt_tokens": "Prompt tokens of each request.",
    "request_generation_tokens": "Sampled tokens of each sequence.",
    "iteration_tokens_total": "Tokens that each step computed.",
}
"""Histograms of the engine, by name."""
SUCCESS = "request_success"
ACCEPTED = "spec_decode_num_accepted_tokens_per_pos"
SERVER_HISTOGRAMS = {
    "request_params_n": "Completions that each request asked for.",
    "request_params_max_tokens": "Most tokens that each request asked for, of those that said a number.",
}
"""Histograms that the server fills from requests."""
HTTP_REQUESTS, HTTP_SECONDS = "http_requests", "http_request_duration_seconds"


def metric_names() -> list[str]:
    """Return all names, without prefix and suffix, in order."""
    figures = [figure.name for figure in (*GAUGES, *COUNTERS)]
    return [*figures, SUCCESS, ACCEPTED, *HISTOGRAMS, *SERVER_HISTOGRAMS, HTTP_REQUESTS, HTTP_SECONDS]


class ServerMetrics(Collector):
    """Metrics of one application; has a registry of its own.

    Args:
        engine: returns what the engine has done. model_name: the label of all metrics.
        vllm_names: report the metrics that both projects have under the prefix ``vllm:`` too.
        exchange: where the other API processes of the server tell theirs, or None when this is the only one.
    """

    def __init__(
        self,
        engine: Callable[[], EngineMetrics],
        model_name: str,
        *,
        vllm_names: bool = False,
        exchange: Exchange | None = None,
    ) -> None:
        self._engine, self._model, self._vllm, self._exchange = engine, model_name, vllm_names, exchange
        self._params = {"request_params_n": Histogram(FEW), "request_params_max_tokens": Histogram(COUNTS)}
        self._http: Counter[tuple[str, str, str]] = Counter()
        self._seconds: dict[tuple[str, str], Histogram] = {}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def count(self, call: Call) -> None:
        """Count a call that is over. The labels have few values whatever clients send."""
        method = call.method if call.method in _METHODS else "other"
        route = call.route or "none"
        self._http[method, route, str(call.final_status)] += 1
        self._seconds.setdefault((method, route), Histogram(SECONDS)).observe(call.duration)
        for generation in call.generations:
            self._params["request_params_n"].observe(generation.n)
            if generation.max_tokens is not None:
                self._params["request_params_max_tokens"].observe(generation.max_tokens)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        numbers = self.numbers()
        if self._exchange is not None:
            self._exchange.write(numbers)
            numbers = self._exchange.total()
        for prefix in (PREFIX, VLLM_PREFIX) if self._vllm else (PREFIX,):
            yield from self._of_engine(prefix, numbers.engine)
            for name, help_text in SERVER_HISTOGRAMS.items():
                yield self._histogram(prefix + name, help_text, numbers.params[name])
        yield from self._of_http(numbers)

    def numbers(self) -> Numbers:
        """Return what this process counted."""
        return Numbers(
            self._engine(),
            {name: histogram.data() for name, histogram in self._params.items()},
            [(*key, number) for key, number in self._http.items()],
            [(*pair, histogram.data()) for pair, histogram in self._seconds.items()],
            time.time(),
        )

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics and their content type: the text format of OpenMetrics where ``accept`` names it, else the
        one of Prometheus.
        """
        kinds = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
        wants_open = "application/openmetrics-text" in kinds
        encode: Callable[[CollectorRegistry], bytes]
        encode = openmetrics.generate_latest if wants_open else exposition.generate_latest
        return encode(self.registry), openmetrics.CONTENT_TYPE_LATEST if wants_open else exposition.CONTENT_TYPE_LATEST

    def _of_engine(self, prefix: str, snapshot: EngineMetrics) -> Iterator[Metric]:
        for figure in GAUGES:
            gauge = GaugeMetricFamily(prefix + figure.name, figure.help, labels=["model_name"])
            gauge.add_metric([self._model], figure.read(snapshot))
            yield gauge
        for figure in COUNTERS:
            counter = CounterMetricFamily(prefix + figure.name, figure.help, labels=["model_name"])
            counter.add_metric([self._model], figure.read(snapshot))
            yield counter
        yield self._success(prefix, snapshot)
        yield self._accepted(prefix, snapshot)
        for name, help_text in HISTOGRAMS.items():
            yield self._histogram(prefix + name, help_text, snapshot.histograms[name])

    def _success(self, prefix: str, snapshot: EngineMetrics) -> Metric:
        labels = ["model_name", "finished_reason"]
        counter = CounterMetricFamily(prefix + SUCCESS, "Finished requests, by reason.", labels=labels)
        for reason in dict.fromkeys((*_REASONS, *snapshot.finished)):
            counter.add_metric([self._model, reason], snapshot.finished.get(reason, 0))
        return counter

    def _accepted(self, prefix: str, snapshot: EngineMetrics) -> Metric:
        text = "Draft tokens that were kept, by their place among the drafts of a round, from 0."
        counter = CounterMetricFamily(prefix + ACCEPTED, text, labels=["model_name", "position"])
        for position, number in enumerate(snapshot.accepted_per_position or (0,)):
            counter.add_metric([self._model, str(position)], number)
        return counter

    def _histogram(self, name: str, help_text: str, data: HistogramData) -> Metric:
        family = HistogramMetricFamily(name, help_text, labels=["model_name"])
        family.add_metric([self._model], _buckets(data), data.total)
        return family

    def _of_http(self, numbers: Numbers) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            PREFIX + HTTP_REQUESTS, "Answered HTTP requests.", labels=["model_name", "method", "route", "status"]
        )
        for method, route, status, number in numbers.calls:
            requests.add_metric([self._model, method, route, status], number)
        yield requests
        seconds = HistogramMetricFamily(
            PREFIX + HTTP_SECONDS, "Time to the end of the answer.", labels=["model_name", "method", "route"]
        )
        for method, route, data in numbers.seconds:
            seconds.add_metric([self._model, method, route], _buckets(data), data.total)
        yield seconds


def _buckets(data: HistogramData) -> list[tuple[str, float]]:
    names = [*(repr(bound) for bound in data.bounds), "+Inf"]
    return list(zip(names, map(float, data.cumulative), strict=True))


class MetricsRoute:
    """Answers ``GET /metrics``; no other route can take its place."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["type"] == "http" and route_path(scope) == "/metrics" and scope["method"] in ("GET", "HEAD")
        if not asked:
            await self._app(scope, receive, send)
            return
        call_of(scope).route = "/metrics"
        body, kind = self._metrics.text(Request(scope).headers.get("accept", ""))
        await Response(body, headers={"content-type": kind})(scope, receive, send)
