"""How a real server stops: signals in mid-stream, a time limit, a dead engine."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

import httpx2
import pytest
from served import LONG, Served, Start, events

pytestmark = pytest.mark.model
TOKENS = 60


def until_text(stream: Any) -> None:
    """Read events until one has text."""
    for event in stream:
        if event["choices"][0]["text"]:
            return


def test_sigterm_in_mid_stream_lets_the_stream_finish(start: Start) -> None:
    served = start().ready()
    address = (served.url.removeprefix("http://").partition(":")[0], int(served.url.rpartition(":")[2]))
    options = {"include_usage": True}
    body = {**LONG, "max_tokens": TOKENS, "stream_options": options}
    with served.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        stream = events(response)
        until_text(stream)
        served.signal()
        served.wait_for("stopping: 1 requests run")
        with served.client() as other:
            late = other.post("/v1/completions", json={"prompt": "a"})
            assert (late.status_code, late.headers["retry-after"]) == (503, "5")
            assert late.json()["error"]["code"] == "shutting_down"
            assert other.get("/health").status_code == 200
            ready = other.get("/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
        rest = list(stream)
    assert rest[-1] == "[DONE]"
    assert rest[-2]["usage"]["completion_tokens"] == TOKENS
    assert served.exit_code() == 0
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


@pytest.mark.parametrize(("flags", "signals", "code"), [([], 2, 130), (["--drain-timeout-s", "0.3"], 1, 0)])
def test_streams_that_do_not_finish_are_ended(start: Start, flags: list[str], signals: int, code: int) -> None:
    served = start(*flags).ready()
    with served.client() as client, client.stream("POST", "/v1/completions", json=LONG) as response:
        stream = events(response)
        until_text(stream)
        begun = time.monotonic()
        served.signal()
        if signals > 1:
            served.wait_for("stopping")
            served.signal(signal.SIGINT)
        last = list(stream)[-1]
    assert last["error"] == {
        "message": "the server is shutting down and ended this request",
        "type": "service_unavailable",
        "param": None,
        "code": "shutting_down",
    }
    assert served.exit_code() == code
    assert time.monotonic() - begun < 10
    assert "1 requests were ended before they finished" in served.log


def test_a_signal_while_the_model_is_loaded_ends_the_server(start: Start) -> None:
    served = start()
    served.wait_for("loading")
    served.signal()
    assert served.exit_code() == 130
    assert "listening" not in served.log


def test_a_killed_engine_is_told_to_all_and_ends_the_server(start: Start) -> None:
    served = start().ready()
    with served.client() as client, client.stream("POST", "/v1/completions", json=LONG) as response:
        stream = events(response)
        until_text(stream)
        os.kill(served.engine_pid(), signal.SIGKILL)
        last = list(stream)[-1]
    assert last["error"]["code"] == "engine_dead"
    assert "the engine process stopped" in last["error"]["message"]
    assert served.exit_code() == 1
    assert "the engine died; the server ends" in served.log
    assert "error: the engine process stopped: it ended with exit code -9" in served.log


def test_the_port_is_taken_before_the_model_is_loaded(start: Start) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        served = start("--port", port)
        assert served.exit_code() == 2
    assert f"error: cannot listen on 127.0.0.1:{port}: something else listens there" in served.log
    assert "loading" not in served.log


def test_nothing_answers_while_the_model_is_loaded(start: Start) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    served: Served = start("--port", port)
    served.wait_for("loading")
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"http://127.0.0.1:{port}/health")
    served.signal(signal.SIGINT)
    assert served.exit_code() == 130
