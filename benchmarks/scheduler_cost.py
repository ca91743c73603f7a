"""What a step costs the host before and after the device: ``schedule`` and ``update`` without a model.

python benchmarks/scheduler_cost.py [--running 256] [--steps 200]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from jackfield.kv_cache import CacheGroup, KVCacheManager
from jackfield.protocol import EngineCoreRequest, ModelRunnerOutput, SamplerOutput, SamplingParams, SchedulerOutput
from jackfield.scheduler import Scheduler, SchedulerLimits

BLOCK_SIZE = 16
LENGTH = 4096


def scheduler_of(running: int, *, caching: bool) -> Scheduler:
    """Return a scheduler with room for ``running`` whole sequences."""
    groups = [CacheGroup("full", (0,), ())]
    cache = KVCacheManager(groups, BLOCK_SIZE, running * LENGTH // BLOCK_SIZE + 1, running, caching=caching)
    return Scheduler(SchedulerLimits(running, 8192, LENGTH), cache)


def ask(scheduler: Scheduler, count: int, prompt: int) -> None:
    """Queue ``count`` requests with different prompts."""
    params = SamplingParams(max_tokens=None)
    for index in range(count):
        tokens = [index + 1] * prompt
        scheduler.add(
            EngineCoreRequest(
                request_id=f"r{index}",
                prompt_token_ids=tokens,
                sampling_params=params,
                eos_token_ids=[0],
                max_tokens=LENGTH - prompt,
                seed=0,
                arrival=index,
            )
        )


def result_of(plan: SchedulerOutput) -> ModelRunnerOutput:
    """Return what a model would: one token per row, never an end."""
    return ModelRunnerOutput(plan.step_id, SamplerOutput(np.full((int(plan.samples.sum()), 1), 7, dtype=np.int32)))


def advance(scheduler: Scheduler) -> tuple[float, float]:
    """Run one step; returns seconds of ``schedule`` and of ``update``."""
    started = time.perf_counter()
    plan = scheduler.schedule()
    planned = time.perf_counter()
    result = result_of(plan)
    before = time.perf_counter()
    scheduler.update(plan, result)
    return planned - started, time.perf_counter() - before


def report(name: str, times: list[tuple[float, float]]) -> None:
    """Print medians and the worst step."""
    schedule, update = ([pair[at] * 1e6 for pair in times] for at in (0, 1))
    both = [a + b for a, b in zip(schedule, update, strict=True)]
    print(
        f"{name:<44}{statistics.median(schedule):>10.0f}{statistics.median(update):>10.0f}"
        f"{statistics.median(both):>10.0f}{max(both):>10.0f}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    print(f"{'microseconds a step':<44}{'schedule':>10}{'update':>10}{'both':>10}{'worst':>10}")
    for caching in (False, True):
        scheduler = scheduler_of(options.running, caching=caching)
        ask(scheduler, options.running, 32)
        while scheduler.num_waiting:
            advance(scheduler)
        times = [advance(scheduler) for _ in range(options.steps)]
        report(f"{options.running} running, prefix cache {'on' if caching else 'off'}", times)
    for waiting in (100, 10_000):
        scheduler = scheduler_of(options.running, caching=True)
        ask(scheduler, options.running + waiting, 32)
        while scheduler.num_running < options.running:
            advance(scheduler)
        advance(scheduler)
        report(f"{options.running} running, {waiting} waiting", [advance(scheduler) for _ in range(options.steps)])


if __name__ == "__main__":
    main()
