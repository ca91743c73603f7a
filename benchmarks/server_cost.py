"""What the API layer costs: streams of a fake engine through the real server, read by a client in another process.

    python benchmarks/server_cost.py --streams 256 --rate 50

The fake engine lives in the server's process, which is bound to one core, and makes one token for every stream at each
tick: the real output processor turns them into text. What is told for each kind of request:

- added ms: from the tick that was due to the arrival of the token's event at the client, median and 99th percentile;
- cpu s / 1000: processor seconds of the server's process for 1,000 tokens, the fake engine and the output processor
  included, which cost in real servers too;
- ceiling: streams of that rate which would fill one core.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "server"))

from fake_engine import FakeEngine, scores

from jackfield.client.address import parse_address
from jackfield.client.events import Event
from jackfield.client.wire import Wire
from jackfield.config import load_config
from jackfield.engine.outputs import RequestOutput
from jackfield.protocol import CoreEvent, EngineCoreOutput, EngineCoreRequest, FinishReason, SamplingParams
from jackfield.server.operations import run as server
from jackfield.server.operations.sockets import address_text, bound_socket

TEXT = b"The quick brown fox jumps over the lazy dog and goes on. "
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {}),
    "chat": ("/v1/chat/completions", {}),
    "completions, 5 logprobs": ("/v1/completions", {"logprobs": 5}),
    "chat, 5 logprobs": ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 5}),
}


@dataclass
class Result:
    """One run. Seconds, and milliseconds in ``lags``."""

    wall: float
    cpu: float
    tokens: int
    lags: list[float]


class Ticking(FakeEngine):
    """Makes a token for every stream at each tick of a clock, in one step as an engine does.

    Args:
        rate: ticks a second; 0 makes them as fast as they are taken.
    """

    def __init__(self, rate: float) -> None:
        super().__init__(max_model_len=1_000_000, max_num_seqs=100_000)
        self._rate = rate
        self._streams: dict[str, tuple[asyncio.Queue[RequestOutput], EngineCoreRequest, int]] = {}
        self._task: asyncio.Task[None] | None = None

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams | None = None, request_id: str | None = None, **_: Any
    ) -> AsyncIterator[RequestOutput]:
        """Yield what the ticks make."""
        assert sampling_params is not None and request_id is not None
        processed = self._inputs.prompt(prompt)
        [request] = self._inputs.requests(request_id, processed, sampling_params, 0)
        self._outputs.add(request_id, processed.text, [request])
        queue: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self._streams[request_id] = queue, request, 0
        self._task = self._task or asyncio.create_task(self._tick())
        while True:
            output = await queue.get()
            yield output
            if output.finished:
                return

    async def _tick(self) -> None:
        due = time.perf_counter()
        while True:
            due = max(due + 1 / self._rate, time.perf_counter() - 1.0)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            events = [self._one(name, due) for name in list(self._streams)]
            for output in self._outputs.process(EngineCoreOutput(events))[0]:
                self._streams[output.request_id][0].put_nowait(output)
                if output.finished:
                    del self._streams[output.request_id]

    def _one(self, name: str, due: float) -> CoreEvent:
        queue, request, done = self._streams[name]
        self._streams[name] = queue, request, done + 1
        token = TEXT[done % len(TEXT)]
        finish = FinishReason.LENGTH if done + 1 >= request.max_tokens else None
        logprobs = [scores(token)] if request.sampling_params.logprobs is not None else None
        return CoreEvent(request.request_id, [token], finish, None, logprobs, None, cached_tokens=0)


def serve(pipe: Connection, rate: float, core: int | None) -> None:
    """Serve a fake engine until the process is told to end."""
    if core is not None:
        os.sched_setaffinity(0, {core})

    async def main() -> None:
        config = load_config(api={"model": "fake/model", "server.port": 0}, env={})
        with bound_socket(config.server) as sock:
            pipe.send(address_text(sock, config.server))
            await server.run_api(Ticking(rate), config, [sock])

    with asyncio.Runner(loop_factory=server._loop_factory()) as runner:
        runner.run(main())


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process so far, of user and system."""
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


async def load(url: str, pid: int, kind: str, streams: int, tokens: int, rate: float) -> Result:
    """Read streams until all are over."""
    path, fields = KINDS[kind]
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    body |= {"max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0, **fields}
    arrivals: list[list[float]] = [[] for _ in range(streams)]

    def taker(place: int) -> Callable[[Event, float], None]:
        return lambda event, now: (
            arrivals[place].append(now) if any(choice.has_output() for choice in event.choices) else None
        )

    async with Wire(parse_address(url), {"content-type": "application/json"}) as wire:
        begun, cpu = time.perf_counter(), processor_seconds(pid)
        await asyncio.gather(*(wire.stream(path, body, taker(place)) for place in range(streams)))
        wall, cpu = time.perf_counter() - begun, processor_seconds(pid) - cpu
    return Result(wall, cpu, sum(map(len, arrivals)), lags(arrivals, rate))


def lags(arrivals: list[list[float]], rate: float) -> list[float]:
    """Return how much later than the earliest possible each token came, in ms. Ticks are evenly spaced, so that the
    tick of a token is known up to one constant; the fastest token of all is taken to have taken no time.
    """
    phases = [[at - number / rate for number, at in enumerate(times)] for times in arrivals]
    first = min(map(min, phases))
    found = []
    for row in phases:
        whole = round((min(row) - first) * rate) / rate  # streams that began some ticks later
        found += [(phase - first - whole) * 1e3 for phase in row]
    return found


def measure(kind: str, args: argparse.Namespace) -> Result:
    """Return one run against a server of its own."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(there, args.rate, args.server_core), daemon=True)
    process.start()
    try:
        url = here.recv()
        assert process.pid is not None
        time.sleep(1.0)
        asyncio.run(load(url, process.pid, kind, 4, 5, args.rate))
        return asyncio.run(load(url, process.pid, kind, args.streams, args.tokens, args.rate))
    finally:
        process.terminate()
        process.join(20)


def row(kind: str, runs: list[Result], args: argparse.Namespace) -> dict[str, Any]:
    """Return the best figures of several runs."""
    per_thousand = min(1000 * run.cpu / run.tokens for run in runs)
    best = min(runs, key=lambda run: statistics.median(run.lags))
    cuts = statistics.quantiles(best.lags, n=100)
    return {
        "kind": kind,
        "streams": args.streams,
        "tokens": best.tokens,
        "expected_s": round(args.tokens / args.rate, 2),
        "wall_s": round(min(run.wall for run in runs), 2),
        "added_p50_ms": round(cuts[49], 2),
        "added_p99_ms": round(cuts[98], 2),
        "cpu_s_per_1000": round(per_thousand, 4),
        "ceiling_streams": int(1000 / per_thousand / args.rate),
    }


def versions() -> dict[str, str]:
    """Return what runs the server."""
    found = {name: importlib.metadata.version(name) for name in ("uvicorn", "fastapi", "starlette", "msgspec")}
    for name in ("uvloop", "httptools"):
        found[name] = importlib.metadata.version(name) if importlib.util.find_spec(name) else "not installed"
    return {"python": sys.version.split()[0], **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=50.0, help="tokens a second of each stream")
    parser.add_argument("--tokens", type=int, default=250, help="of each stream")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--server-core", type=int, default=None, help="the core that the server is bound to")
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    args = parser.parse_args()
    print(json.dumps(versions()), flush=True)
    for kind in args.kinds:
        runs = [measure(kind, args) for _ in range(args.runs)]
        print(json.dumps(row(kind, runs, args)), flush=True)


if __name__ == "__main__":
    main()
