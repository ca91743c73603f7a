"""Times products with four-bit weights on a CUDA device beside torch's with bfloat16 weights.

``python benchmarks/gpu_packed.py [--rows 1 2 ...]``: one JSON object per matrix and number of rows. Work is recorded
into a graph that goes through copies of the weight which together exceed the second-level cache; times are medians of
replays. Bytes are those of numbers, scales and zero points.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from jackfield_quantization.triton_packed_launch import (
    Packed,
    PackedShape,
    counters_needed,
    packed_product,
    packed_shape,
)
from jackfield_quantization.triton_packed_scheme import unpacked

MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
"""Of an 8B model."""
CACHED_BYTES = 256 << 20
GROUP = 128
REPLAYS = 9
SHAPES = [
    PackedShape(16, 16, 2, 2, 4),
    PackedShape(16, 16, 4, 4, 3),
    PackedShape(32, 16, 1, 4, 4),
    PackedShape(32, 16, 4, 4, 3),
    PackedShape(64, 16, 1, 4, 4),
    PackedShape(64, 16, 2, 4, 3),
    PackedShape(128, 64, 1, 8, 3),
    PackedShape(128, 128, 1, 8, 4),
    PackedShape(64, 128, 1, 4, 4),
    PackedShape(128, 256, 1, 8, 3),
]
SPLITS = (0, 1, 2, 4, 8)


def seconds(copies: int, work: Callable[[int], Any]) -> float:
    """Return median seconds of ``work`` on one copy."""
    work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            work(copy)
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / copies)
    return statistics.median(times)


def random_weight(outputs: int, inputs: int, copies: int) -> list[Packed]:
    def numbers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, dtype=torch.uint8, device="cuda")

    groups = inputs // GROUP
    scales = torch.rand(outputs, groups, device="cuda").half() * 0.01
    return [
        Packed(numbers(256, outputs, inputs // 2), scales, numbers(16, outputs, groups), GROUP) for _ in range(copies)
    ]


def measure(name: str, rows: int, cores: int) -> dict[str, Any]:
    """Return what one matrix and number of rows take, with the best launch of those tried."""
    outputs, inputs = MATRICES[name]
    copies = max(2, CACHED_BYTES // (outputs * inputs // 2))
    weights = random_weight(outputs, inputs, copies)
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)
    counters = torch.zeros(outputs * max(1, rows // 16), dtype=torch.int32, device="cuda")
    dense = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(max(2, copies // 4))]
    group_of = torch.arange(inputs, device="cuda") // GROUP
    first = weights[0]
    wide = (unpacked(first.numbers).float() - first.zeros.float()[:, group_of]) * first.scales.float()[:, group_of]
    packed_product(x, first, None, out, cores, counters)
    wanted = x.double() @ wide.bfloat16().double().t()
    error = float((out.double() - wanted).norm() / wanted.norm())
    times: dict[str, float] = {}
    for shape in dict.fromkeys([packed_shape(rows), *SHAPES]):
        for splits in SPLITS if rows <= 16 else (1,):
            try:
                label = f"{shape} splits={splits}"
                times[label] = seconds(
                    copies,
                    lambda copy, s=shape, n=splits: packed_product(  # type: ignore[misc]
                        x, weights[copy], None, out, cores, counters, s, n
                    ),
                )
            except Exception as problem:
                times[f"{label}: {type(problem).__name__}"] = float("inf")
    chosen = f"{packed_shape(rows)} splits={0 if rows <= 16 else 1}"
    best = min(times, key=lambda label: times[label])
    plain = seconds(len(dense), lambda copy: F.linear(x, dense[copy]))
    stored = outputs * inputs // 2 + 3 * outputs * inputs // GROUP
    return {
        "matrix": name,
        "rows": rows,
        "error": error,
        "counters": counters_needed(outputs),
        "chosen_us": times[chosen] * 1e6,
        "best_us": times[best] * 1e6,
        "best": best,
        "torch_bf16_us": plain * 1e6,
        "tb_s": stored / times[best] / 1e12,
        "tflop_s": 2 * rows * outputs * inputs / times[best] / 1e12,
        "torch_tflop_s": 2 * rows * outputs * inputs / plain / 1e12,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64, 256])
    parser.add_argument("--matrices", nargs="+", default=list(MATRICES), choices=list(MATRICES))
    args = parser.parse_args()
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    for name in args.matrices:
        for rows in args.rows:
            print(json.dumps(measure(name, rows, cores)), flush=True)


if __name__ == "__main__":
    main()
