"""A real server with everything on: TLS, keys, CORS, logs, a Unix socket, time limits, metrics."""

from __future__ import annotations

import json
import re
import ssl
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import KEYS, LONG, Served, events

pytestmark = pytest.mark.model
Guarded = tuple[Served, Path]


def secure(guarded: Guarded, **options: Any) -> httpx2.Client:
    served, certificate = guarded
    return served.client(verify=ssl.create_default_context(cafile=str(certificate)), **options)


def test_tls_and_keys(guarded: Guarded) -> None:
    with secure(guarded) as client:
        assert client.get("/health").json() == {"status": "ok"}
        closed = client.get("/v1/models")
        assert (closed.status_code, closed.json()["error"]["code"]) == (401, "invalid_api_key")
        for headers in ({"authorization": f"Bearer {KEYS[0]}"}, {"x-api-key": KEYS[1]}):
            assert client.get("/v1/models", headers=headers).status_code == 200
    with httpx2.Client() as stranger, pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        stranger.get(f"{guarded[0].url}/health")


def test_limits_of_bodies_and_headers(guarded: Guarded) -> None:
    def parts() -> Any:
        for _ in range(5):
            yield b"a" * 4000

    with secure(guarded, headers={"x-api-key": KEYS[0]}) as client:
        for content in (b"a" * 20_000, parts()):
            answer = client.post("/v1/completions", content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        answer = client.get("/v1/models", headers={f"h{n}": "v" for n in range(1000)})
        assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")
        answer = client.get("/v1/models", headers={"big": "v" * 70_000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")
        assert client.get("/v1/models").status_code == 200


def test_pages_of_an_allowed_origin_may_ask(guarded: Guarded) -> None:
    with secure(guarded) as client:
        asked = {"origin": "https://example.org", "access-control-request-method": "POST"}
        assert (
            client.options("/v1/completions", headers=asked).headers["access-control-allow-origin"] == asked["origin"]
        )


def test_log_lines_are_json_and_hold_no_secret(guarded: Guarded) -> None:
    served, _ = guarded
    headers = {"x-api-key": KEYS[0], "x-request-id": "mine-1"}
    with secure(guarded) as client:
        body = {"prompt": "The sea", "max_tokens": 3, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body, headers=headers)
        assert answer.headers["x-request-id"] == "mine-1"
    served.wait_for('"request_id": "mine-1"')
    records = [json.loads(line) for line in served.lines]
    (record,) = [record for record in records if record.get("request_id") == "mine-1"]
    prompt_tokens = answer.json()["usage"]["prompt_tokens"]
    assert {**record, "time": "", "duration_ms": 0} == {
        "time": "",
        "level": "info",
        "logger": "jackfield.server.access",
        "message": "POST /v1/completions",
        "request_id": "mine-1",
        "route": "/v1/completions",
        "status": 200,
        "duration_ms": 0,
        "client": "127.0.0.1",
        "prompt_tokens": prompt_tokens,
        "generation_tokens": 3,
    }
    assert not any(key in served.log for key in KEYS)


class Metrics:
    """What /metrics says now."""

    def __init__(self, client: httpx2.Client) -> None:
        text = client.get("/metrics").text
        self._found = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self._found.get((name, frozenset({"model_name": "tiny", **labels}.items())), 0.0)


@pytest.fixture
def client(local: Served) -> Any:
    path = local.url.removeprefix("unix:")
    transport = httpx2.HTTPTransport(uds=path)
    with httpx2.Client(transport=transport, base_url="http://local", timeout=60) as found:
        yield found


def idle(client: httpx2.Client) -> Metrics:
    """Return the metrics once nothing runs."""
    end = time.monotonic() + 5
    while (metrics := Metrics(client))("jackfield:num_requests_running"):
        assert time.monotonic() < end, "a request still runs"
        time.sleep(0.05)
    return metrics


def test_metrics_count_what_was_asked(client: httpx2.Client) -> None:
    before = idle(client)
    usages = []
    for body in ({"max_tokens": 4}, {"max_tokens": 6, "n": 2}):
        answer = client.post("/v1/completions", json={"prompt": "The sea is", "ignore_eos": True, **body})
        usages.append(answer.json()["usage"])
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": -1}).status_code == 400
    after = idle(client)

    def grown(name: str, **labels: str) -> float:
        return after(name, **labels) - before(name, **labels)

    assert [usage["completion_tokens"] for usage in usages] == [4, 12]
    for prefix in ("jackfield:", "vllm:"):
        assert grown(f"{prefix}generation_tokens_total") == 16
        assert grown(f"{prefix}prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
        assert grown(f"{prefix}request_success_total", finished_reason="length") == 2
        assert grown(f"{prefix}request_success_total", finished_reason="stop") == 0
        assert grown(f"{prefix}time_to_first_token_seconds_count") == 2
        assert grown(f"{prefix}e2e_request_latency_seconds_count") == 2
        assert grown(f"{prefix}inter_token_latency_seconds_count") == 3 + 5 + 5
        assert grown(f"{prefix}request_generation_tokens_count") == 3
        assert grown(f"{prefix}request_generation_tokens_sum") == 16
        assert grown(f"{prefix}request_params_n_sum") == 3
        assert grown(f"{prefix}request_params_max_tokens_sum") == 10
    place = {"method": "POST", "route": "/v1/completions"}
    assert grown("jackfield:http_requests_total", status="200", **place) == 2
    assert grown("jackfield:http_requests_total", status="400", **place) == 1
    assert 0 < grown("jackfield:e2e_request_latency_seconds_sum") < 60
    assert after("jackfield:kv_cache_usage_perc") == 0


def test_requests_that_take_too_long_end_and_free_the_engine(client: httpx2.Client) -> None:
    before = idle(client)
    answer = client.post("/v1/completions", json={**LONG, "stream": False})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
    with client.stream("POST", "/v1/completions", json=LONG) as response:
        last = list(events(response))[-1]
    assert last["error"]["message"] == "the request took longer than the 3 s that this server allows"
    after = idle(client)
    aborted = [m("jackfield:request_success_total", finished_reason="abort") for m in (before, after)]
    assert aborted[1] - aborted[0] == 2


def test_a_client_that_leaves_frees_the_engine(client: httpx2.Client, local: Served) -> None:
    with client.stream("POST", "/v1/completions", json=LONG, headers={"x-request-id": "leaves"}) as response:
        next(events(response))
    begun = time.monotonic()
    idle(client)
    assert time.monotonic() - begun < 1.0
    local.wait_for("client_left=True")
    assert re.search(r"request_id=leaves route=/v1/completions status=200 .*client_left=True", local.log)
