"""Times products of few rows on a CUDA device: torch's, and a sweep of launches of the Triton kernel.

``python benchmarks/gpu_dense.py [--only TEXT] [--rows 1 2 ...] [--fp8]``: one JSON object per matrix and number of
rows, then a table. With ``--fp8`` weights are 8-bit floats, and torch's product includes quantizing the rows. Work is
recorded into a graph that goes through copies of the weight which together exceed the second-level cache; times are
medians of replays, launches of a graph's nodes included. Bytes are those of the weight.

``--chains``: what surrounds wide weights instead, unfolded and folded (see ``dense_chains``).

Legend: T rows of activations, I inputs, O outputs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from jackfield_quantization.fp8_kernels import quantize_tokens
from jackfield_quantization.triton_dense_launch import padded_rows, skinny_product
from jackfield_quantization.triton_dense_plan import FEW_ROWS, SkinnyShape, filled, skinny_shape

DEVICE = torch.device("cuda", 0)
CACHED_BYTES = 256 << 20
"""Copies together are at least this large."""
MOST_SUMS = 128
"""More sums than these do not fit a thread's registers."""
MOST_COPIES = 64
REPLAYS = 9
TOLERANCE = 8e-3
"""Largest relative error, in the Euclidean norm: the rounding of bfloat16."""
MATRICES = {
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096),
    "8b gate_up": (24576, 4096),
    "8b down": (4096, 12288),
    "8b head": (151936, 4096),
    "0.6b qkv": (4096, 1024),
    "0.6b o": (1024, 2048),
    "0.6b gate_up": (6144, 1024),
    "0.6b down": (1024, 3072),
    "0.6b head": (151936, 1024),
}
PLAIN = [
    (SkinnyShape(16, 512, 0, 4, 3, False), 2),
    (SkinnyShape(8, 512, 0, 4, 3, False), 2),
    (SkinnyShape(8, 512, 0, 4, 4, False), 4),
    (SkinnyShape(4, 1024, 0, 4, 3, False), 4),
    (SkinnyShape(8, 1024, 0, 4, 1, False), 4),
    (SkinnyShape(4, 1024, 0, 4, 1, False), 2),
    (SkinnyShape(4, 1024, 0, 4, 1, False), 8),
    (SkinnyShape(4, 512, 0, 2, 1, False), 8),
]
NARROW = [
    (SkinnyShape(8, 1024, 0, 4, 3, False), 2),
    (SkinnyShape(4, 2048, 0, 4, 3, False), 2),
    (SkinnyShape(4, 1024, 0, 4, 4, False), 4),
    (SkinnyShape(8, 512, 0, 4, 6, False), 4),
    (SkinnyShape(8, 512, 0, 2, 4, False), 8),
    (SkinnyShape(4, 1024, 0, 2, 4, False), 8),
    (SkinnyShape(2, 2048, 0, 4, 4, False), 8),
    (SkinnyShape(2, 2048, 0, 2, 4, False), 8),
    (SkinnyShape(16, 256, 0, 4, 5, False), 4),
    (SkinnyShape(8, 1024, 0, 8, 3, False), 2),
    (SkinnyShape(16, 1024, 0, 8, 3, False), 1),
    (SkinnyShape(8, 2048, 0, 8, 3, False), 1),
    (SkinnyShape(2, 4096, 0, 4, 1, False), 8),
    (SkinnyShape(1, 4096, 0, 4, 1, False), 8),
]
"""Further launches to try for 8-bit weights of one row."""
MATRIX = [
    (SkinnyShape(64, 128, 0, 4, 4, True), 2),
    (SkinnyShape(64, 256, 0, 4, 3, True), 1),
    (SkinnyShape(64, 64, 0, 4, 6, True), 4),
    (SkinnyShape(32, 256, 0, 4, 4, True), 2),
    (SkinnyShape(16, 512, 0, 4, 3, True), 2),
    (SkinnyShape(16, 256, 0, 2, 4, True), 4),
    (SkinnyShape(32, 256, 0, 4, 4, True, slices=4), 2),
    (SkinnyShape(16, 512, 0, 8, 1, True, slices=8, registers=128), 2),
    (SkinnyShape(32, 512, 0, 8, 1, True, slices=8, registers=128), 2),
]
"""Launches to try, each with the programs wanted on a multiprocessor."""


@dataclass
class Case:
    """One matrix, copied, and some rows."""

    name: str
    x: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor
    counters: torch.Tensor
    cores: int
    scale: torch.Tensor | None = None

    def launches(self) -> list[SkinnyShape]:
        """Return the launches to try, the one that is chosen first (if one is); none twice."""
        rows, (_, outputs, inputs) = len(self.x), self.weights.shape
        listed = (PLAIN if rows <= FEW_ROWS else []) + (NARROW if rows == 1 and self.scale is not None else []) + MATRIX
        found = [filled(s, outputs, inputs, self.cores, fill) for s, fill in listed if sums(rows, s) <= MOST_SUMS]
        chosen = skinny_shape(rows, outputs, inputs, self.cores)
        return list(dict.fromkeys(found if chosen is None else [chosen, *found]))

    def launch(self, shape: SkinnyShape, copy: int = 0) -> torch.Tensor:
        """Multiply with one copy."""
        return skinny_product(self.x, self.weights[copy], None, self.out, shape, self.counters, scale_O=self.scale)

    def seconds(self, work: Callable[[int], Any]) -> float:
        """Return median seconds of ``work`` on one copy."""
        return seconds_of(work, len(self.weights))

    def torch_seconds(self) -> float:
        """Return seconds of torch's product."""
        return self.seconds(self._torch)

    def _torch(self, copy: int) -> torch.Tensor:
        return (
            F.linear(self.x, self.weights[copy])
            if self.scale is None
            else scaled(self.x, self.weights[copy], self.scale)
        )

    def wanted(self) -> torch.Tensor:
        """Return the product with the first copy, in float64."""
        weight = self.weights[0].double() if self.scale is None else self.weights[0].double() * self.scale.unsqueeze(-1)
        return self.x.double() @ weight.t()

    def try_launch(self, shape: SkinnyShape) -> float | str:
        """Return seconds, or what is wrong."""
        try:
            self.out.fill_(math.nan)
            wanted = self.wanted()
            error = float((self.launch(shape).double() - wanted).norm() / wanted.norm())
            if not error < TOLERANCE:
                return f"wrong: relative error {error:.2e}"
            return self.seconds(partial(self.launch, shape))
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]


def scaled(x_TI: torch.Tensor, weight_OI: torch.Tensor, scale_O: torch.Tensor) -> torch.Tensor:
    """Return torch's product of rows that are quantized first."""
    rows = quantize_tokens(x_TI)
    scales = {"scale_a": rows.scales.unsqueeze(-1), "scale_b": scale_O.unsqueeze(0)}
    return torch._scaled_mm(rows.values, weight_OI.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def sums(rows: int, shape: SkinnyShape) -> int:
    """Return the sums that a thread holds in registers without matrix units, else 0."""
    return 0 if shape.matrix else shape.block_o * shape.block_i * padded_rows(rows, shape) // (32 * shape.warps)


def seconds_of(work: Callable[[int], Any], copies: int) -> float:
    """Return median seconds of ``work`` on one of the copies, recorded for all of them."""
    work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            work(copy)
    graph.replay()
    return replayed(graph) / copies


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Return median seconds of a replay."""
    events = []
    for _ in range(REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize()
    return sorted(float(start.elapsed_time(stop)) for start, stop in events)[REPLAYS // 2] / 1e3


def cases(only: str, counts: list[int], most: int = MOST_COPIES, *, fp8: bool = False) -> Iterator[Case]:
    """Yield the cases whose name contains ``only``; the copies of a matrix are shared by its cases."""
    cores = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for name, (outputs, inputs) in MATRICES.items():
        if only not in name:
            continue
        copies = min(most, max(2, -(-CACHED_BYTES // ((1 if fp8 else 2) * outputs * inputs))))
        weights = torch.empty(copies, outputs, inputs, dtype=torch.bfloat16, device=DEVICE).normal_()
        scale = torch.rand(outputs, device=DEVICE) + 0.5 if fp8 else None
        weights = weights.to(torch.float8_e4m3fn) if fp8 else weights
        counters = torch.zeros(outputs, dtype=torch.int32, device=DEVICE)
        for rows in counts:
            x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=DEVICE)
            yield Case(name, x, weights, x.new_empty(rows, outputs), counters, cores, scale)


def compile_all(only: str, counts: list[int], *, fp8: bool) -> int:
    """Launch everything once, in parallel, so that compilers run side by side; return how many launches."""

    def first(case: Case, shape: SkinnyShape) -> None:
        torch.cuda.set_device(DEVICE)
        case.out = torch.empty_like(case.out)
        try:
            counters = torch.zeros_like(case.counters)
            skinny_product(case.x, case.weights[0], None, case.out, shape, counters, scale_O=case.scale)
        except Exception as error:
            print(json.dumps({"launch": str(shape), "error": f"{type(error).__name__}: {error}"[:200]}), flush=True)

    with ThreadPoolExecutor(12) as pool:
        done = [
            pool.submit(first, case, shape) for case in cases(only, counts, 1, fp8=fp8) for shape in case.launches()
        ]
        for item in done:
            item.result()
    torch.cuda.synchronize()
    return len(done)


def short(shape: SkinnyShape) -> str:
    """Return a launch in one word."""
    kind = ("sliced" if shape.slices > 1 else "matrix") if shape.matrix else "plain"
    return f"{kind}-{shape.block_o}x{shape.block_i}-s{shape.splits}-w{shape.warps}-p{shape.stages}"


def measure(case: Case) -> dict[str, Any]:
    """Return the row of one case."""
    rows, (_, outputs, inputs) = len(case.x), case.weights.shape
    torch_us = round(case.torch_seconds() * 1e6, 2)
    tried = {shape: case.try_launch(shape) for shape in case.launches()}
    times = {shape: round(s * 1e6, 2) for shape, s in tried.items() if isinstance(s, float)}
    chosen = skinny_shape(rows, outputs, inputs, case.cores)
    row: dict[str, Any] = {"matrix": case.name, "O": outputs, "I": inputs, "T": rows, "torch_us": torch_us}
    row |= {"chosen": short(chosen) if chosen else "torch", "chosen_us": times.get(chosen) if chosen else torch_us}
    row["torch_TB/s"] = rate(case, torch_us)
    if times:
        best = min(times, key=times.__getitem__)
        row |= {"best": short(best), "best_us": times[best], "best_TB/s": rate(case, times[best])}
    row["all_us"] = {short(shape): us for shape, us in sorted(times.items(), key=lambda item: item[1])}
    row["failed"] = {short(shape): text for shape, text in tried.items() if isinstance(text, str)}
    return row


def rate(case: Case, us: float) -> float:
    """Return TB/s of the weight."""
    return round(case.weights[0].nbytes / us / 1e6, 2)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows side by side."""
    columns = ("matrix", "T", "torch_us", "torch_TB/s", "best_us", "best_TB/s", "best", "chosen_us", "chosen")
    lines = [columns, *(tuple(str(row.get(column, "")) for column in columns) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)) for line in lines)


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="only matrices (or chains) whose name contains this text")
    parser.add_argument("--rows", type=int, nargs="+", help="default: 1 2 4 8 16, of chains 2 4 5 8")
    parser.add_argument("--fp8", action="store_true", help="weights of 8-bit floats")
    parser.add_argument("--chains", action="store_true", help="norm, wide product, activation, product")
    arguments = parser.parse_args(given)
    arguments.rows = arguments.rows or ([2, 4, 5, 8] if arguments.chains else [1, 2, 4, 8, 16])
    return arguments


def main() -> None:
    """Run what was asked for."""
    arguments = arguments_of()
    torch.manual_seed(0)
    if arguments.chains:
        import dense_chains

        dense_chains.run(arguments.only, arguments.rows, arguments.fp8, seconds_of, short)
        return
    start = time.monotonic()
    launches = compile_all(arguments.only, arguments.rows, fp8=arguments.fp8)
    head = {"device": torch.cuda.get_device_name(DEVICE), "torch": torch.__version__, "launches": launches}
    print(json.dumps(head | {"compile_s": round(time.monotonic() - start, 1)}), flush=True)
    rows = []
    for case in cases(arguments.only, arguments.rows, fp8=arguments.fp8):
        rows.append(measure(case))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    print(json.dumps({"seconds": round(time.monotonic() - start, 1)}))
    if any(row["failed"] for row in rows):
        raise SystemExit("some launches failed; see the rows")


if __name__ == "__main__":
    main()
