"""Finds launches by measuring them: for each number of rows both products at once, one tile of rows after another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from jackfield.errors import ConfigError
from jackfield.interfaces import ExpertsRequest
from jackfield.interfaces.moe import ExpertMatrices, Tuned
from jackfield_moe.triton_plan import Launch, Plan, default_launch, file_name, plan_content

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of rows that are measured."""
SHARED_BYTES = 220 * 1024
"""What tiles in flight may take of a multiprocessor's memory."""

Measure = Callable[[int, Launch, Launch], float]
"""From rows and the launches of both products to milliseconds; infinity where they do not run."""


def tune(request: ExpertsRequest, device: str, progress: Callable[[str], None]) -> Tuned:
    """Return the fastest launches on this process's device.

    Raises:
        ConfigError: there is no device, or the layout has no random matrices to measure with.
    """
    if not device:
        raise ConfigError("there is no device to measure on", field="platform", value="cpu", remedy="run it on a GPU")
    plan = search(request, measure_on_device(request), progress)
    return Tuned(file_name(request, device), plan_content(plan))


def search(request: ExpertsRequest, measure: Measure, progress: Callable[[str], None]) -> Plan:
    """Return the launches that ``measure`` finds fastest: first of the product with gate and up, then of the other."""
    width = 4 if request.dtype == "float32" else 2
    ups, downs = [], []
    for rows in ROWS:
        start = default_launch(rows * request.top_k, request.num_experts, width, request.kind)
        best = measure(rows, start, start), start, start
        for tile in (16, 32, 64, 128):
            found = _best_of_tile(rows, tile, width, measure)
            best = min(best, found, key=lambda one: one[0])
        time, up, down = best
        ups.append((rows, up))
        downs.append((rows, down))
        progress(f"{rows} rows: {time * 1000:.1f} us with {up} and {down}")
    return Plan(tuple(ups), tuple(downs), "measured")


def _best_of_tile(rows: int, tile: int, width: int, measure: Measure) -> tuple[float, Launch, Launch]:
    choices = list(candidates(tile, width))
    up = min(choices, key=lambda launch: measure(rows, launch, choices[0]))
    down = min(choices, key=lambda launch: measure(rows, up, launch))
    return measure(rows, up, down), up, down


def candidates(tile: int, width: int) -> Iterator[Launch]:
    """Return launches with that many rows in a tile whose tiles in flight fit; ``width`` is bytes of a number."""
    depths = (64 // width, 128 // width, 256 // width)
    for columns, depth, swizzle, warps, stages in itertools.product((32, 64, 128), depths, (1, 16), (4, 8), (2, 3, 4)):
        in_flight = stages * depth * width * (tile + 2 * columns)
        if in_flight <= SHARED_BYTES and not (tile * columns < 2048 and warps == 8):
            yield Launch(tile, columns, depth, swizzle, warps, stages)


def measure_on_device(request: ExpertsRequest) -> Measure:
    """Return a function that measures on random rows, matrices and choices."""
    import torch
    from triton.testing import do_bench

    from jackfield_moe.triton_experts import ACTIVATIONS
    from jackfield_moe.triton_launch import given_rows, run_experts

    dtype, device = getattr(torch, request.dtype), torch.device("cuda")
    parts = 2 if request.gated else 1
    sizes = ((parts * request.intermediate_size, request.hidden_size), (request.hidden_size, request.intermediate_size))
    up, down = (_random(request, *size) for size in sizes)

    def measure(rows: int, first: Launch, second: Launch) -> float:
        x = torch.randn(rows, request.hidden_size, dtype=dtype, device=device)
        experts = torch.rand(rows, request.num_experts, device=device).topk(request.top_k).indices
        weights = torch.rand(rows, request.top_k, device=device)
        activation = ACTIVATIONS[request.activation]

        def work() -> None:
            given = given_rows(x, up, down)
            run_experts(request, (first, second), given, up, down, weights, experts, dtype, activation)

        try:
            return float(do_bench(work, warmup=5, rep=20))
        except Exception:  # a launch that does not compile or fit is no candidate, whatever the compiler says of it
            return float("inf")

    return measure


def _random(request: ExpertsRequest, outputs: int, inputs: int) -> ExpertMatrices:
    import torch

    shape, dtype = (request.num_experts, outputs, inputs), getattr(torch, request.dtype)
    if request.kind == "dense":
        return ExpertMatrices("dense", torch.randn(shape, dtype=dtype, device="cuda") * inputs**-0.5)
    if request.kind != "fp8":
        raise ConfigError(
            "launches cannot be measured for this layout",
            field="layout",
            value=request.kind,
            remedy="dense and fp8 can",
        )
    scale = torch.full((*shape[:2], 1), inputs**-0.5, device="cuda")
    return ExpertMatrices("fp8", torch.randn(shape, dtype=dtype, device="cuda").to(torch.float8_e4m3fn), scale)
