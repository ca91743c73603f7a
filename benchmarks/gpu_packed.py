"""Times products with four-bit weights on a CUDA device beside torch's with bfloat16 weights.

``python benchmarks/gpu_packed.py [--rows 1 2 ...] [--all]``: one JSON object per matrix and number of rows, of the
launch that is chosen, and with ``--all`` of the best of many. Work is recorded into a graph that goes through copies of
the weight which together exceed the second-level cache; times are medians of replays. ``floor_us`` is what reading
numbers, scales of two bytes and zero points of one takes at the bandwidth that summing a large tensor reaches.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from jackfield_quantization.triton_packed_launch import (
    SLICED_OUTPUTS,
    Packed,
    PackedShape,
    has_copy_engine,
    packed_product,
    packed_shape,
    splits_used,
)
from jackfield_quantization.triton_packed_scheme import decoded_codes, unpacked
from jackfield_triton.launch import has_gluon, pdl_of

MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
"""Of an 8B model."""
CACHED_BYTES = 256 << 20
GROUP, BLOCK = 128, 128
REPLAYS = 25
FEW = [(64, 8, 2, 4), (64, 8, 2, 3), (128, 8, 4, 3), (64, 16, 4, 4), (64, 16, 2, 5), (128, 16, 4, 4), (64, 32, 4, 4)]
MANY = [(64, 64, 4, 4), (64, 64, 4, 5), (128, 64, 4, 3), (64, 128, 4, 3), (64, 256, 4, 3), (128, 128, 8, 3)]
SPLITS = (1, 2, 4, 6, 8, 12, 16)
SLICED = [(8, 8), (8, 16), (4, 8), (4, 4), (16, 16)]
"""Warps and slices."""


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


def read_bandwidth() -> float:
    """Return bytes a second."""
    large = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    return float(large.nbytes / seconds(2, lambda _: large.sum()))


def random_weight(outputs: int, inputs: int, copies: int) -> list[Packed]:
    """Return weights of random numbers with one set of scales and zero points."""
    words = (inputs // BLOCK, outputs, BLOCK // 4)
    scales = (torch.rand(inputs // GROUP, outputs, device="cuda") * 0.01).half().float().view(torch.int32)
    codes = scales + torch.randint_like(scales, 0, 16)
    numbers = [torch.randint(-(1 << 15), 1 << 15, words, dtype=torch.int16, device="cuda") for _ in range(copies)]
    return [Packed(one, codes, GROUP) for one in numbers]


def error_of(out: torch.Tensor, x: torch.Tensor, weight: Packed) -> float:
    """Return the relative error against the expanded weight, not rounded."""
    scales, zeros = (found.t().repeat_interleave(GROUP, 1) for found in decoded_codes(weight.codes))
    wanted = x.double() @ ((unpacked(weight.numbers).float() - zeros) * scales).double().t()
    return float((out.double() - wanted).norm() / wanted.norm())


def candidates(rows: int, inputs: int, tma: bool) -> Iterator[PackedShape]:
    """Yield launches to try."""
    shapes = [PackedShape(*sizes, few=True) for sizes in FEW if rows <= sizes[1] <= max(16, 2 * rows)]
    shapes += [PackedShape(*sizes, tma=tma) for sizes in MANY if rows > 16 and sizes[1] <= max(64, 2 * rows)]
    for shape in shapes:
        for splits in SPLITS:
            if splits_used(inputs // BLOCK, splits) == splits:
                yield replace(shape, splits=splits)
    if rows <= 16 and has_gluon():
        for warps, slices in SLICED:
            yield PackedShape(SLICED_OUTPUTS, 8 if rows <= 8 else 16, warps, 1, few=True, slices=slices)


def measure(name: str, rows: int, bandwidth: float, every: bool) -> dict[str, Any]:
    """Return what one matrix and number of rows take."""
    outputs, inputs = MATRICES[name]
    copies = max(2, CACHED_BYTES // (outputs * inputs // 2))
    weights = random_weight(outputs, inputs, copies)
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)
    counters = torch.zeros(outputs * max(1, rows // 16), dtype=torch.int32, device="cuda")
    dense = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(max(2, copies // 4))]
    capability = torch.cuda.get_device_capability()
    tma, pdl = has_copy_engine(capability), pdl_of(capability)
    chosen = packed_shape(rows, outputs, torch.cuda.get_device_properties(0).multi_processor_count, tma)
    packed_product(x, weights[0], None, out, chosen, counters, pdl)
    error = error_of(out, x, weights[0])
    times: dict[PackedShape, float] = {}
    sliced_error = 0.0
    for shape in dict.fromkeys([chosen, *(candidates(rows, inputs, tma) if every else ())]):
        try:
            if shape.slices:
                packed_product(x, weights[0], None, out.zero_(), shape, counters, pdl)
                sliced_error = max(sliced_error, error_of(out, x, weights[0]))
            times[shape] = seconds(
                copies,
                lambda copy, s=shape: packed_product(x, weights[copy], None, out, s, counters, pdl),  # type: ignore[misc]
            )
        except Exception as problem:
            print(f"{shape}: {type(problem).__name__}", flush=True)
    best = min(times, key=lambda shape: times[shape])
    plain = seconds(len(dense), lambda copy: torch.mm(x, dense[copy].t(), out=out))
    floor = (outputs * inputs // 2 + 3 * outputs * inputs // GROUP) / bandwidth
    return {
        "matrix": name,
        "rows": rows,
        "error": error,
        "us": times[chosen] * 1e6,
        "launch": str(chosen),
        "best_us": times[best] * 1e6,
        "best": str(best),
        "sliced_us": {str(shape): time * 1e6 for shape, time in times.items() if shape.slices},
        "sliced_error": sliced_error,
        "floor_us": floor * 1e6,
        "torch_bf16_us": plain * 1e6,
        "of_bandwidth": floor / times[chosen],
        "of_torch": plain / times[chosen],
    }


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--matrices", nargs="+", default=list(MATRICES), choices=list(MATRICES))
    parser.add_argument("--all", action="store_true", help="try many launches")
    args = parser.parse_args()
    bandwidth = read_bandwidth()
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "read_tb_s": bandwidth / 1e12}), flush=True)
    for name in args.matrices:
        for rows in args.rows:
            print(json.dumps(measure(name, rows, bandwidth, args.all)), flush=True)


if __name__ == "__main__":
    main()
