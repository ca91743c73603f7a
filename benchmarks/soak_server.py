"""The soak of a real ``jackfield serve``: a mix of all APIs over HTTP, with clients that leave and requests that are
wrong. Used by ``soak.py --server``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

WORDS = ["the", "sea", "a", "river", "of", "light", "and", "stone"]
START_SECONDS = 180.0
LEAK_MB = 100.0
"""How much more memory a process may hold at the end than after its warm-up."""
WRONG: tuple[tuple[str, Any], ...] = (
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "temperature": -1}),
    ("/v1/completions", {"prompt": [10**9]}),
    ("/v1/completions", {"prompt": "x", "stop": ["x"] * 5000}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}),
    ("/v1/responses", {"input": "x", "previous_response_id": "none"}),
    ("/v1/embeddings", {"input": "x"}),
    ("/v1/models/none", {}),
)
"""Requests that a server which generates must refuse with 4xx."""


@dataclass
class Tally:
    """What clients saw."""

    finished: int = 0
    left: int = 0
    refused: int = 0
    errors: list[str] = field(default_factory=list)


class Server:
    """``jackfield serve`` in a process of its own; its log goes to a file."""

    def __init__(self, model: str, log: Path) -> None:
        self._log = log
        flags = ["--port", "0", "--max-model-len", "512", "--num-blocks", "120", "--max-num-seqs", "8"]
        command = [sys.executable, "-m", "jackfield.cli", "serve", model, *flags, "--response-store-bytes", "1MiB"]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def url(self) -> str:
        """Return the address once the server listens."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            if found := re.search(r"listening on (http://\S+)", self._log.read_text()):
                return found.group(1)
            time.sleep(0.1)
        sys.exit(f"the server did not start:\n{self._log.read_text()}")

    def memory_mb(self) -> dict[str, float]:
        """Return the resident memory of the server and of the largest process below it, the engine."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [pid for children in tasks for pid in children.read_text().split()]
        return {"server_mb": resident_mb(self.process.pid), "engine_mb": max(resident_mb(int(pid)) for pid in pids)}

    def stop(self) -> int:
        """Tell the server to end and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def faults(self) -> list[str]:
        """Return lines of the log that tell of errors."""
        lines = self._log.read_text().splitlines()
        return [line for line in lines if " ERROR " in line or line.startswith("Traceback")]


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the path and body of a random request."""
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, 150)))
    talk, limit = [{"role": "user", "content": text}], rng.randint(1, 40)
    sampling = {"temperature": rng.choice([0, 0.8]), "top_p": rng.choice([1.0, 0.9])}
    kinds: list[tuple[str, dict[str, Any]]] = [
        (
            "/v1/chat/completions",
            {"messages": talk, "max_tokens": limit, "logprobs": rng.random() < 0.3, **sampling},
        ),
        ("/v1/completions", {"prompt": text, "max_tokens": limit, "stop": ["."], **sampling}),
        ("/v1/completions", {"prompt": [text, "a"], "max_tokens": limit, "n": 2, "temperature": 1, "logprobs": 2}),
        ("/v1/responses", {"input": text, "max_output_tokens": limit, **sampling}),
        ("/v1/messages", {"messages": talk, "max_tokens": limit, **sampling}),
        ("/v1/messages/count_tokens", {"messages": talk}),
        ("/tokenize", {"prompt": text}),
    ]
    return rng.choice(kinds)


async def one(http: httpx2.AsyncClient, rng: random.Random, tally: Tally) -> None:
    """Send one request: a third of the streams are left early, and some whole answers are not waited for."""
    if rng.random() < 0.1:
        path, body = rng.choice(WRONG)
        answer = await http.post(path, json=body)
        tally.refused += 1
        if not 400 <= answer.status_code < 500:
            tally.errors.append(f"{answer.status_code} for a wrong request of {path}")
        return
    path, body = request(rng)
    if path.startswith("/v1") and "count" not in path and rng.random() < 0.6:
        leave = rng.randint(1, 3000) if rng.random() < 0.33 else None
        await stream(http, path, {**body, "stream": True}, leave, tally)
    else:
        limit = rng.uniform(0.01, 0.5) if rng.random() < 0.2 else None
        await whole(http, path, body, limit, tally)


async def stream(http: httpx2.AsyncClient, path: str, body: Any, leave: int | None, tally: Tally) -> None:
    """Read a stream to its end, or leave after so many bytes."""
    data = b""
    async with http.stream("POST", path, json=body) as answer:
        async for piece in answer.aiter_bytes():
            data += piece
            if leave is not None and len(data) > leave:
                tally.left += 1
                return
    complete = any(mark in data for mark in (b"data: [DONE]", b"message_stop", b"response.completed", b"response.inc"))
    if answer.status_code != 200 or not complete or b'"error":{' in data:
        tally.errors.append(f"{answer.status_code} in a stream of {path}: {data[-200:]!r}")
    tally.finished += 1


async def whole(http: httpx2.AsyncClient, path: str, body: Any, limit: float | None, tally: Tally) -> None:
    """Ask for a whole answer, and leave after ``limit`` seconds."""
    try:
        async with asyncio.timeout(limit):
            answer = await http.post(path, json=body)
    except TimeoutError:
        tally.left += 1
        return
    if answer.status_code != 200:
        tally.errors.append(f"{answer.status_code} from {path}: {answer.text[:200]}")
    tally.finished += 1


async def client(url: str, seed: int, deadline: float, tally: Tally) -> None:
    """Send one request after another."""
    rng = random.Random(seed)
    async with httpx2.AsyncClient(base_url=url, timeout=120) as http:
        while time.monotonic() < deadline:
            try:
                await one(http, rng, tally)
            except Exception as error:
                tally.errors.append(f"{type(error).__name__}: {error}")


def gauges(url: str) -> dict[str, float]:
    """Return what the server's metrics say is held."""
    text = httpx2.get(f"{url}/metrics", timeout=30).text
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    rows = {name: re.search(rf"^jackfield:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE) for name in names}
    return {name: float(row.group(1)) if row else float("nan") for name, row in rows.items()}


async def settled(url: str) -> dict[str, float]:
    """Return the gauges once nothing is held, or after ten seconds as they are."""
    found = gauges(url)
    for _ in range(100):
        if not any(value != 0 for value in found.values()):
            break
        await asyncio.sleep(0.1)
        found = gauges(url)
    return found


async def drive(url: str, server: Server, args: argparse.Namespace, tally: Tally) -> list[dict[str, float]]:
    """Send load until the time is over; return the memory after a fifth of it, then at each minute and at the end."""
    begin = time.monotonic()
    deadline, memory = begin + args.minutes * 60, list[dict[str, float]]()
    clients = [asyncio.create_task(client(url, seed, deadline, tally)) for seed in range(args.clients)]
    wait = args.minutes * 12
    while any(not task.done() for task in clients):
        await asyncio.wait(clients, timeout=wait)
        wait = 60
        memory.append(server.memory_mb())
        row = {name: value for name, value in vars(tally).items() if name != "errors"}
        print(json.dumps({"s": round(time.monotonic() - begin), **row, **memory[-1]}), flush=True)
    return memory


async def soak_server(args: argparse.Namespace) -> int:
    """Run the soak and return 1 when something is left over or went wrong."""
    server, tally = Server(args.model, Path(args.log)), Tally()
    try:
        url = server.url()
        before = gauges(url)
        memory = await drive(url, server, args, tally)
        after = await settled(url)
        code = server.stop()
    finally:
        server.process.kill()
    grown = {name: round(memory[-1][name] - memory[0][name], 1) for name in memory[0]}
    found = {"errors": tally.errors[:5], "log": server.faults()[:5], "before": before, "after": after}
    print(json.dumps({**found, "grown_mb": grown, "exit_code": code}), flush=True)
    failed = tally.errors or server.faults() or after != before or code or max(grown.values()) > LEAK_MB
    return int(bool(failed))
