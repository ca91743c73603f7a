"""Times of drawing tokens on a CUDA device: the Triton kernel beside torch's way.

``python benchmarks/gpu_draw.py``: microseconds, medians; one line per number of rows and parameters.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))

from draw_world import batch_of

from jackfield.protocol import SamplingParams
from jackfield.sampling.draw import draw_tokens as by_torch
from jackfield_ops.triton_draw import draw_tokens as by_triton

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
}


def microseconds(work: Callable[[], Any]) -> float:
    """Return the median time of ``work``, called again and again: the device's, or the host's where that is longer."""
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e5)
    return round(statistics.median(times[2:]), 1)


def main() -> None:
    """Measure."""
    print(f"{'rows':>5}  {'parameters':<24}{'torch':>10}{'triton':>10}")
    for rows in (1, 16, 64, 256):
        logits = (torch.randn(rows, 151_936, device="cuda") * 4).bfloat16()
        for name, values in CASES.items():
            params = SamplingParams(temperature=0.8, max_tokens=None, **values)
            batch = batch_of([params], [0] * rows, "cuda")
            torch_us = microseconds(lambda batch=batch, logits=logits: by_torch(logits, batch))
            triton_us = microseconds(lambda batch=batch, logits=logits: by_triton(logits, batch))
            print(f"{rows:>5}  {name:<24}{torch_us:>10}{triton_us:>10}", flush=True)


if __name__ == "__main__":
    main()
