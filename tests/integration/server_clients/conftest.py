"""A scripted server for each test, and the command line in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from scripted_server import Script, ScriptedServer

Serve = Callable[..., ScriptedServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers that follow a script."""
    running: list[ScriptedServer] = []

    def start(**script: object) -> ScriptedServer:
        running.append(ScriptedServer(Script(**script)).__enter__())  # type: ignore[arg-type]
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def start_command() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start ``jackfield`` with arguments; what is left of it at the end is killed."""
    started: list[subprocess.Popen[str]] = []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JACKFIELD")}

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "jackfield.cli", *arguments]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "OMP_NUM_THREADS": "1"},
            # A shell ignores the interrupt for what it starts in the background, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
