"""Several API processes before one engine."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import LONG, Served, Start, events, words

pytestmark = pytest.mark.model
BODY = {"prompt": "The sea is", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


def total(text: str, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(text)
    samples = (sample for family in families for sample in family.samples if sample.name == name)
    return sum(s.value for s in samples if all(s.labels.get(key) == value for key, value in labels.items()))


def ask(served: Served) -> dict[str, Any]:
    """Ask on a connection of its own: which process answers is chance."""
    with served.client() as client:
        answer = client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


def opened(served: Served) -> Served:
    served.wait_for("listening on")
    end = time.monotonic() + 60
    while served.log.count("listening on") < 2:
        assert time.monotonic() < end, served.log
        time.sleep(0.05)
    return served.ready()


def test_they_share_an_engine_a_socket_and_their_numbers(start: Start) -> None:
    served = opened(start("--api-processes", "2"))
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: ask(served), range(12)))
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    time.sleep(1.2)
    with served.client() as client:
        text = client.get("/metrics").text
    assert total(text, "jackfield:request_success_total", finished_reason="length") == 12
    assert total(text, "jackfield:generation_tokens_total") == 72
    assert total(text, "jackfield:request_params_max_tokens_count") == 12
    assert total(text, "jackfield:http_requests_total", route="/v1/completions", status="200") == 12
    assert total(text, "jackfield:num_requests_running") == 0
    with served.client() as client, client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 40}) as answer:
        stream = events(answer)
        next(stream)
        served.signal()
        assert list(stream)[-1] == "[DONE]", "what runs may finish"
    assert served.exit_code() == 0


@pytest.mark.parametrize("victim", ["engine", "api"])
def test_a_process_that_dies_ends_the_server_with_an_error(start: Start, victim: str) -> None:
    served = opened(start("--api-processes", "2"))
    own = [pid for pid in served.children if "spawn_main" in words(pid)]
    engine = own[0]
    os.kill(engine if victim == "engine" else own[-1], signal.SIGKILL)
    assert served.exit_code() == 1
    assert ("the engine process stopped" if victim == "engine" else "ended with exit code -9") in served.log


def test_nothing_outlives_a_server_that_is_killed(start: Start) -> None:
    served = opened(start("--api-processes", "2"))
    os.kill(served.process.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while [pid for pid in served.children if Path(f"/proc/{pid}").exists() and "spawn_main" in words(pid)]:
        assert time.monotonic() < end, "processes are left"
        time.sleep(0.1)
    with pytest.raises(httpx2.ConnectError), served.client() as client:
        client.get("/health")
