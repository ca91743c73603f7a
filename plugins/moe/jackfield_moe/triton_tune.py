"""Finds launches by measuring them: for each number of rows both products at once, changing one number at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from jackfield.errors import ConfigError
from jackfield.interfaces import ExpertsRequest
from jackfield.interfaces.moe import ExpertMatrices, Tuned
from jackfield_moe.triton_plan import FEW_ROWS, Launch, Plan, default_plan, file_name, plan_content

ROWS = (FEW_ROWS + 1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of rows that are measured: fewer are multiplied by other kernels."""
SHARED_BYTES = 220 * 1024
"""What tiles in flight may take of a multiprocessor's memory."""

Measure = Callable[[int, Launch, Launch], float]
"""From rows and the launches of both products to milliseconds; infinity where they do not run."""


def tune(request: ExpertsRequest, device: str, progress: Callable[[str], None], *, copy_engine: bool = False) -> Tuned:
    """Return the fastest launches on this process's device; ``copy_engine``: it can bring tiles by itself.

    Raises:
        ConfigError: there is no device, or the layout has no random matrices to measure with.
    """
    if not device:
        raise ConfigError("there is no device to measure on", field="platform", value="cpu", remedy="run it on a GPU")
    plan = search(request, measure_on_device(request), progress, copy_engine=copy_engine)
    return Tuned(file_name(request, device), plan_content(plan))


def search(
    request: ExpertsRequest, measure: Measure, progress: Callable[[str], None], *, copy_engine: bool = False
) -> Plan:
    """Return launches that no change of one number makes faster, for each number of rows. The search starts from the
    rules and from what was found for fewer rows.
    """
    rules = default_plan(request, hopper=copy_engine)
    width = 4 if request.dtype == "float32" else 2
    found: list[tuple[int, tuple[Launch, Launch]]] = []
    for rows in ROWS:
        known: dict[tuple[Launch, Launch], float] = {}

        def timed(pair: tuple[Launch, Launch], rows: int = rows, known: dict[Any, float] = known) -> float:
            if pair not in known:
                known[pair] = measure(rows, *pair)
            return known[pair]

        starts = [rules.of(rows), *(pair for _, pair in found[-1:])]
        best = _descended(min(starts, key=timed), timed, width, copy_engine=copy_engine)
        found.append((rows, best))
        progress(f"{rows} rows: {timed(best) * 1000:.1f} us with {best[0]} and {best[1]}")
    ups, downs = (tuple((rows, pair[which]) for rows, pair in found) for which in (0, 1))
    return Plan(ups, downs, "measured")


def _descended(
    best: tuple[Launch, Launch], timed: Callable[[tuple[Launch, Launch]], float], width: int, *, copy_engine: bool
) -> tuple[Launch, Launch]:
    """Return a pair that no neighbour is faster than."""
    while True:
        near = min(neighbours(best, width, copy_engine=copy_engine), key=timed)
        if timed(near) >= timed(best):
            return best
        best = near


def neighbours(
    pair: tuple[Launch, Launch], width: int, *, copy_engine: bool = False
) -> Iterator[tuple[Launch, Launch]]:
    """Return pairs that differ in one number of one launch, or in the rows of both, and whose tiles in flight fit."""
    values: Mapping[str, tuple[Any, ...]] = {
        "rows": (16, 32, 64, 128),
        "columns": (32, 64, 128, 256),
        "depth": (64 // width, 128 // width, 256 // width),
        "swizzle": (1, 16),
        "warps": (4, 8),
        "stages": (2, 3, 4),
        "tma": (False, True) if copy_engine else (False,),
    }
    for field, value in ((field, value) for field, some in values.items() for value in some):
        up, down = (replace(launch, **{field: value}) for launch in pair)
        for near in ((up, pair[1]), (pair[0], down), *([(up, down)] if field == "rows" else [])):
            if near != pair and _fits(near[0], width, 2) and _fits(near[1], width, 1):
                yield near


def _fits(launch: Launch, width: int, matrices: int) -> bool:
    """Return whether tiles in flight fit; ``matrices``: of whose weights a program reads at once."""
    return launch.stages * launch.depth * width * (launch.rows + matrices * launch.columns) <= SHARED_BYTES


def measure_on_device(request: ExpertsRequest) -> Measure:
    """Return a function that measures on random rows, matrices and choices."""
    import torch
    from triton.testing import do_bench_cudagraph

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
            return float(do_bench_cudagraph(work, rep=5))
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
