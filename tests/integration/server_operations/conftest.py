"""Servers that tests share, and servers of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import make_certificate
from served import KEYS, Served, Start


@pytest.fixture
def start() -> Iterator[Start]:
    """Start servers that the test ends itself."""
    started: list[Served] = []

    def begin(*flags: str) -> Served:
        started.append(Served(*flags))
        return started[-1]

    yield begin
    for served in started:
        served.kill()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """A server with TLS, API keys, CORS and JSON logs, and its certificate."""
    folder = tmp_path_factory.mktemp("guarded")
    certificate, key = make_certificate(folder)
    file = folder / "keys"
    file.write_text("\n".join(KEYS))
    flags = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--api-key-file", str(file)]
    flags += ["--allowed-origins", "https://example.org", "--log-format", "json", "--max-body-bytes", "10KB"]
    served = Served(*flags)
    try:
        yield served.ready(), certificate
    finally:
        served.kill()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on a Unix socket, with a short time for requests and both prefixes of metrics."""
    path = tmp_path_factory.mktemp("local") / "s"
    served = Served(
        "--uds", str(path), "--request-timeout-s", "3", "--vllm-metric-names", "--served-model-name", "tiny"
    )
    try:
        yield served.ready()
    finally:
        served.kill()
