"""Kernel times of a workload of ``engine_bench.py`` on a CUDA device, summed by kernel.

``python benchmarks/gpu_profile.py MODEL WORK [--quantization NAME]``: microseconds a step, for the longest kernels.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from engine_bench import CONFIGS, Jackfield, workloads


def main() -> None:
    """Run once to warm up, once under the profiler."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", choices=sorted(CONFIGS))
    parser.add_argument("work")
    parser.add_argument("--quantization")
    parser.add_argument("--top", type=int, default=18)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(CONFIGS[arguments.model]))
    engine = Jackfield(str(folder), arguments.quantization)
    work = workloads(CONFIGS[arguments.model]["vocab_size"])[arguments.work]
    engine.run(work)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        engine.run(work)
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.device_time_total)
    total = sum(row.device_time_total for row in rows)
    print(f"{arguments.work}: {total / 1e3:.2f} ms of kernels, {sum(row.count for row in rows)} launches")
    for row in rows[: arguments.top]:
        each = row.device_time_total / row.count
        print(f"{row.device_time_total / 1e3:10.2f} ms {row.count:7d} x {each:9.2f} us  {row.key[:110]}")


if __name__ == "__main__":
    main()
