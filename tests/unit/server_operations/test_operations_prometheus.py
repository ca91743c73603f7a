"""/metrics: names, values and labels, and the dashboard and documents over them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from asgi import ask, hello, run, with_calls
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from jackfield.metrics import EngineMetrics, MetricsCollector
from jackfield.metrics.collector import FinishedRequest
from jackfield.protocol import CoreCounters, CoreEvent, EngineCoreOutput, FinishReason
from jackfield.server.operations.calls import Call, Generation
from jackfield.server.operations.prometheus import MetricsRoute, ServerMetrics, metric_names

ROOT = Path(__file__).parents[3]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def filled() -> EngineMetrics:
    collector = MetricsCollector(100)
    counters = CoreCounters(preemptions=1, prefix_queries=12, prefix_hits=8, drafts_proposed=6, drafts_accepted=4)
    events = [CoreEvent("a", [1, 2]), CoreEvent("a", [3], FinishReason.LENGTH)]
    collector.step(EngineCoreOutput(events, running=2, waiting=3, free_blocks=75, counters=counters))
    collector.finish(FinishedRequest("length", 12, 8, 10.0, 10.5, 12.0))
    return collector.snapshot()


def samples(metrics: ServerMetrics) -> Samples:
    text, kind = metrics.text()
    assert kind.startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def figure(found: Samples, name: str, **labels: str) -> float:
    return found[name, tuple(sorted({"model_name": "tiny", **labels}.items()))]


def names(found: Samples, prefix: str) -> set[str]:
    return {re.sub(r"_(total|bucket|sum|count)$", "", name) for name, _ in found if name.startswith(prefix)}


def call(method: str = "POST", route: str = "/v1/completions", status: int = 200, duration: float = 0.3) -> Call:
    return Call("id", method, "/x", 0.0, 0, route=route, status=status, duration=duration)


def test_figures_of_the_engine() -> None:
    found = samples(ServerMetrics(filled, "tiny"))
    assert {name: figure(found, f"jackfield:{name}") for name in ("num_requests_running", "num_requests_waiting")} == {
        "num_requests_running": 2,
        "num_requests_waiting": 3,
    }
    assert figure(found, "jackfield:kv_cache_usage_perc") == 0.25
    expected = {
        "prompt_tokens": 12,
        "prompt_tokens_cached": 8,
        "generation_tokens": 3,
        "prefix_cache_queries": 12,
        "prefix_cache_hits": 8,
        "num_preemptions": 1,
        "spec_decode_num_drafts": 0,
        "spec_decode_num_draft_tokens": 6,
        "spec_decode_num_accepted_tokens": 4,
    }
    assert {name: figure(found, f"jackfield:{name}_total") for name in expected} == expected
    reasons = {r: figure(found, "jackfield:request_success_total", finished_reason=r) for r in ("length", "stop")}
    assert reasons == {"length": 1, "stop": 0}
    assert figure(found, "jackfield:time_to_first_token_seconds_sum") == 0.5
    assert figure(found, "jackfield:time_to_first_token_seconds_bucket", le="0.25") == 0
    assert figure(found, "jackfield:time_to_first_token_seconds_bucket", le="0.5") == 1
    assert figure(found, "jackfield:time_to_first_token_seconds_bucket", le="+Inf") == 1
    assert figure(found, "jackfield:e2e_request_latency_seconds_sum") == 2.0
    assert figure(found, "jackfield:request_generation_tokens_sum") == 3


def test_every_metric_is_there_from_the_start_and_no_other() -> None:
    metrics = ServerMetrics(EngineMetrics, "tiny")
    metrics.count(call())
    found = samples(metrics)
    assert names(found, "jackfield:") == {f"jackfield:{name}" for name in metric_names()}
    assert names(found, "vllm:") == set()
    assert ("process_resident_memory_bytes", ()) in found


def test_the_other_prefix_has_the_same_figures() -> None:
    metrics = ServerMetrics(filled, "tiny", vllm_names=True)
    metrics.count(call())
    found = samples(metrics)
    mine = {key[0].removeprefix("jackfield:"): value for key, value in found.items() if key[0].startswith("jackfield:")}
    theirs = {key[0].removeprefix("vllm:"): value for key, value in found.items() if key[0].startswith("vllm:")}
    assert {name: mine[name] for name in theirs} == theirs
    assert {name for name in set(mine) - set(theirs) if not name.startswith("http_")} == set()


def test_requests_are_counted_by_route_and_status() -> None:
    metrics = ServerMetrics(EngineMetrics, "tiny")
    generation = Generation(n=3, max_tokens=40, temperature=1.0, top_p=1.0)
    endless = Generation(n=1, max_tokens=None, temperature=1.0, top_p=1.0)
    for one in (call(), call(status=400), call(duration=0.7)):
        one.generations = [generation, endless] if one.status == 400 else []
        metrics.count(one)
    metrics.count(call(method="BREW", route=""))
    found = samples(metrics)
    place = {"method": "POST", "route": "/v1/completions"}
    assert figure(found, "jackfield:http_requests_total", status="200", **place) == 2
    assert figure(found, "jackfield:http_requests_total", status="400", **place) == 1
    assert figure(found, "jackfield:http_requests_total", status="200", method="other", route="none") == 1
    assert figure(found, "jackfield:http_request_duration_seconds_sum", **place) == pytest.approx(1.3)
    assert figure(found, "jackfield:http_request_duration_seconds_bucket", le="0.5", **place) == 2
    assert figure(found, "jackfield:request_params_n_sum") == 4
    assert figure(found, "jackfield:request_params_n_count") == 2
    assert figure(found, "jackfield:request_params_max_tokens_count") == 1
    assert figure(found, "jackfield:request_params_max_tokens_bucket", le="50.0") == 1


def test_labels_stay_few_whatever_clients_ask() -> None:
    api = FastAPI()

    @api.get("/v1/things/{name}")
    async def thing(name: str) -> str:
        return name

    metrics = ServerMetrics(EngineMetrics, "tiny")
    app, _ = with_calls(api, metrics.count)
    for number in range(20):
        run(ask(app, f"/v1/things/{number}", method="GET"))
        run(ask(app, f"/absent/{number}", method=f"X{number}"))
    keys = [dict(labels) for name, labels in samples(metrics) if name == "jackfield:http_requests_total"]
    assert sorted((k["method"], k["route"], k["status"]) for k in keys) == [
        ("GET", "/v1/things/{name}", "200"),
        ("other", "none", "404"),
    ]


def test_the_route_answers_before_the_application() -> None:
    metrics = ServerMetrics(filled, "tiny")
    app, calls = with_calls(MetricsRoute(hello, metrics), metrics.count)
    answer = run(ask(app, "/metrics", method="GET"))
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert b'jackfield:num_requests_running{model_name="tiny"} 2.0' in answer.body
    assert run(ask(app, "/metrics", method="POST")).body == b"hello"
    assert run(ask(app, "/metricsx", method="GET")).body == b"hello"
    assert [one.route for one in calls] == ["/metrics", "", ""]


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text; version=1.0.0"),
        ("text/html", "text/plain; version="),
        ("text/plain; version=what", "text/plain; version="),
        ("text/html, application/openmetrics-text; version=;;=", "application/openmetrics-text; version=1.0.0"),
    ],
)
def test_any_accept_header_is_answered(accept: str, kind: str) -> None:
    app, _ = with_calls(MetricsRoute(hello, ServerMetrics(EngineMetrics, "tiny")))
    answer = run(ask(app, "/metrics", method="GET", headers={"accept": accept}))
    assert answer.status == 200
    assert answer.headers["content-type"].startswith(kind)


def test_applications_do_not_share_metrics() -> None:
    first, second = ServerMetrics(EngineMetrics, "tiny"), ServerMetrics(EngineMetrics, "tiny")
    first.count(call())
    assert any(name.startswith("jackfield:http_requests") for name, _ in samples(first))
    assert not any(name.startswith("jackfield:http_requests") for name, _ in samples(second))


def expressions(node: Any) -> list[str]:
    """Return every Prometheus expression of a dashboard."""
    if isinstance(node, dict):
        own = [
            value for key, value in node.items() if key in ("expr", "query", "definition") and isinstance(value, str)
        ]
        return own + [found for value in node.values() for found in expressions(value)]
    return [found for part in node for found in expressions(part)] if isinstance(node, list) else []


def graphed() -> set[str]:
    dashboard = json.loads((ROOT / "dashboards" / "grafana.json").read_text(encoding="utf-8"))
    found = [name for text in expressions(dashboard) for name in re.findall(r"jackfield:(\w+)", text)]
    return {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in found}


def test_every_metric_of_the_dashboard_exists() -> None:
    assert len(graphed()) > 10
    assert graphed() - set(metric_names()) == set()


def test_every_metric_is_documented() -> None:
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `jackfield:(\w+)`", text, re.MULTILINE)) == set(metric_names())
