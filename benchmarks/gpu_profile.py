"""Where a step's time goes on a GPU: host phases by wall clock, device kernels by the profiler.

    python benchmarks/gpu_profile.py --model qwen3-0.6b --batches 1 64 256 --prompt 512 --steps 32

Prints one JSON line per batch size with milliseconds per step, and the kernels that take most of it.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jackfield
from engine_bench import CONFIGS
from jackfield.engine.core import EngineCore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(CONFIGS))
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rows", type=int, default=14)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(CONFIGS[args.model]))
    start = time.perf_counter()
    llm = jackfield.LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4096,
        gpu_memory_utilization=0.8,
        enable_prefix_caching=False,
    )
    print(json.dumps({"model": args.model, "start_s": round(time.perf_counter() - start, 1)}), flush=True)
    for batch in args.batches:
        profile(llm, batch, args)
    profile_prefill(llm, args)


def profile(llm: Any, batch: int, args: Any) -> None:
    """Bring ``batch`` sequences to steady decode, then time steps with clocks, then with the profiler."""
    core = llm._core
    submit(llm, batch, args.prompt, 4 * args.steps + 32)
    while core.scheduler.num_waiting or any(
        len(c.token_ids) < 4 for r in llm._outputs._requests.values() for c in r.completions
    ):
        llm._step()
    phases = clocked(core)
    begin = time.perf_counter()
    for _ in range(args.steps):
        llm._step()
    wall = (time.perf_counter() - begin) / args.steps * 1e3
    host = {name: round(sum(times[-args.steps :]) / args.steps * 1e3, 3) for name, times in phases.items()}
    restore(core)
    kernels, busy = device_times(llm, args.steps)
    print(
        json.dumps({"batch": batch, "wall_ms": round(wall, 3), "device_ms": round(busy, 3), "host_ms": host}),
        flush=True,
    )
    for name, ms, count in kernels[: args.rows]:
        print(f"    {ms:8.3f} ms  {count:7.1f} x  {name[:110]}", flush=True)
    drain(llm)


def profile_prefill(llm: Any, args: Any) -> None:
    """Time steps of prefill: wall, device, and where the host spends its time."""
    import cProfile
    import io
    import pstats

    for prompts, length in ((1, 128), (4, 2048)):
        walls = []
        for _ in range(6):
            submit(llm, prompts, length, 1)
            begin = time.perf_counter()
            drain(llm)
            walls.append(time.perf_counter() - begin)
        submit(llm, prompts, length, 1)
        host = cProfile.Profile()
        host.enable()
        drain(llm)
        host.disable()
        text = io.StringIO()
        pstats.Stats(host, stream=text).sort_stats("tottime").print_stats(args.rows)
        submit(llm, prompts, length, 1)
        kernels, busy = device_times(llm, 1, lambda: drain(llm))
        row = {"prefill": [prompts, length], "wall_ms": [round(w * 1e3, 2) for w in walls], "device_ms": round(busy, 2)}
        print(json.dumps(row))
        for name, ms, count in kernels[: args.rows]:
            print(f"    {ms:8.3f} ms  {count:7.1f} x  {name[:90]}", flush=True)
        print("\n".join(line[:110] for line in text.getvalue().splitlines()[5 : args.rows + 9]), flush=True)


def submit(llm: Any, batch: int, length: int, new: int) -> None:
    """Queue prompts of random ids."""
    rng = random.Random(0)
    params = jackfield.SamplingParams(temperature=0, ignore_eos=True, max_tokens=new, detokenize=False)
    for _ in range(batch):
        llm.enqueue({"prompt_token_ids": [rng.randrange(1000, 100000) for _ in range(length)]}, params)


def drain(llm: Any) -> None:
    """Run what is queued to its end."""
    llm.wait_for_completion()


def clocked(core: EngineCore) -> dict[str, list[float]]:
    """Put clocks around the phases of a step."""
    times: dict[str, list[float]] = defaultdict(list)

    def around(owner: Any, name: str, label: str) -> None:
        inner = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = inner(*arguments)
            times[label].append(time.perf_counter() - begin)
            return result

        setattr(owner, name, timed)

    around(core.scheduler, "schedule", "schedule")
    around(core.scheduler, "update", "update")
    around(core._executor, "launch", "launch")
    return times


def restore(core: EngineCore) -> None:
    """Take the clocks off."""
    for owner, names in ((core.scheduler, ("schedule", "update")), (core._executor, ("launch",))):
        for name in names:
            vars(owner).pop(name, None)


def device_times(
    llm: Any, steps: int, work: Callable[[], None] | None = None
) -> tuple[list[tuple[str, float, float]], float]:
    """Return (kernel, ms per step, calls per step), most expensive first, and their sum."""
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            (work or llm._step)()
        torch.cuda.synchronize()
    rows = [
        (e.key, e.self_device_time_total / 1e3 / steps, e.count / steps)
        for e in found.key_averages()
        if e.self_device_time_total > 0
    ]
    rows.sort(key=lambda row: -row[1])
    return rows, sum(row[1] for row in rows)


if __name__ == "__main__":
    main()
