"""Grouped products in Triton against a loop in float64, for all layouts; and compilation for capability 9.0. Run as a
program, without the interpreter, this file writes one JSON object per compiled kernel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from op_checks import BOUNDS, draw

from jackfield.interfaces import ExpertsRequest, QuantizedActivation
from jackfield.interfaces.moe import ExpertMatrices
from jackfield.layers.functional import quantize_rows
from jackfield_moe.layouts import matrix_of
from jackfield_moe.triton_experts import TritonExperts
from jackfield_moe.triton_launch import few_experts, run_experts, sort_pairs
from jackfield_moe.triton_plan import FEW_ROWS, FewLaunch, Launch, default_launch, few_launch

SMALL = Launch(16, 32, 32, 1, 4, 2)
SHARED_LIMIT = 227 * 1024
BASE = ExpertsRequest(num_experts=5, top_k=2, hidden_size=48, intermediate_size=40, dtype="float32", kind="dense")


def bytes_of(*shape: int, seed: int, low: int = 0, high: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32).to(torch.uint8)


def stored(layout: str, outputs: int, inputs: int, seed: int, experts: int = 5, **how: Any) -> ExpertMatrices:
    """Return random matrices. ``group``: inputs that share a scale, 0 for whole rows."""
    shape, group = (experts, outputs, inputs), how.get("group", 0) or inputs
    scale = draw(experts, outputs, -(-inputs // group), dtype=torch.float32, seed=seed + 1).abs() * 0.1 + 0.01
    if layout == "dense":
        return ExpertMatrices(layout, draw(*shape, dtype=how.get("dtype", torch.float32), seed=seed))
    if layout == "fp8":
        if how.get("blocks"):
            scale = scale[:, : -(-outputs // how["blocks"])]
        return ExpertMatrices(layout, draw(*shape, dtype=torch.float32, seed=seed).to(torch.float8_e4m3fn), scale)
    if layout == "int8":
        whole = bytes_of(*shape, seed=seed).to(torch.int16) - 128
        return ExpertMatrices(layout, whole.to(torch.int8), scale * 0.1)
    packed = bytes_of(experts, outputs, inputs // 2, seed=seed)
    if layout == "mxfp4":
        return ExpertMatrices(layout, packed, bytes_of(experts, outputs, inputs // 32, seed=seed, low=112, high=122))
    zero = bytes_of(*scale.shape, seed=seed + 2, high=16) if how.get("zero") else None
    return ExpertMatrices(layout, packed, scale, zero)


def activated(found: torch.Tensor, request: ExpertsRequest) -> torch.Tensor:
    gate, up = found.chunk(2) if request.gated else (found, torch.ones_like(found))
    if request.activation == "swiglu_oai":
        gate = gate.clamp(max=request.limit)
        return gate / (1 + torch.exp(-request.alpha * gate)) * (up.clamp(-request.limit, request.limit) + 1)
    if request.activation == "swiglu_step":
        gate = torch.nn.functional.silu(gate).clamp(max=request.limit)
        return gate * up.clamp(-request.limit, request.limit)
    if request.activation == "situ":
        up = request.limit * torch.tanh(up / request.limit) if request.limit else up
        return request.alpha * torch.tanh(gate / request.alpha) * torch.sigmoid(gate) * up
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu2": lambda x: x.clamp(min=0) ** 2,
        "relu": torch.relu,
    }
    return functions[request.activation](gate) * up


def naive(
    request: ExpertsRequest,
    x: torch.Tensor,
    up: ExpertMatrices,
    down: ExpertMatrices,
    weights: torch.Tensor,
    experts: torch.Tensor,
) -> torch.Tensor:
    """Return the result in float64, one pair after another."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for weight, expert in zip(weights[row].double(), experts[row].tolist(), strict=True):
            if expert < 0:
                continue
            inner = matrix_of(up, expert, torch.float64) @ x[row].double()
            inner = activated(inner if up.bias is None else inner + up.bias[expert].double(), request)
            result = matrix_of(down, expert, torch.float64) @ inner
            out[row] += weight * (result if down.bias is None else result + down.bias[expert].double())
    return out


def choices(rows: int, request: ExpertsRequest, kind: str = "random", seed: int = 5) -> torch.Tensor:
    """Return experts [rows, S]: all ``random``, few (others have none), or all pairs of ``one``."""
    count = {"random": request.num_experts, "few": request.top_k, "one": 1}[kind]
    noise = draw(rows, count, dtype=torch.float32, seed=seed)
    if kind == "one":
        return torch.full((rows, request.top_k), 3)
    return noise.argsort(1)[:, : request.top_k] + (1 if kind == "few" else 0)


def run(
    request: ExpertsRequest, rows: int, up: ExpertMatrices, down: ExpertMatrices, kind: str = "random", **options: Any
) -> float:
    """Return the relative error."""
    dtype = getattr(torch, request.dtype)
    x, weights = draw(rows, request.hidden_size, dtype=dtype, seed=1), draw(rows, request.top_k, dtype=torch.float32)
    experts = options.get("experts", choices(rows, request, kind))
    launches = options.get("launches", (SMALL, SMALL))
    given: torch.Tensor | QuantizedActivation = x
    if options.get("narrow"):
        given = quantize_rows(x)
        x = given.values.to(torch.float32) * given.scales.unsqueeze(1)
    if options.get("few"):
        found = few_experts(request, FewLaunch(8, 32, 16, 16), x, up, down, weights, experts, request.activation)
    else:
        found = run_experts(request, launches, given, up, down, weights, experts, dtype, request.activation)
    wanted = naive(request, x, up, down, weights, experts)
    assert found.dtype == dtype
    return float((found.double() - wanted).norm() / wanted.norm())


def plain(request: ExpertsRequest) -> tuple[ExpertMatrices, ExpertMatrices]:
    dtype, inner = getattr(torch, request.dtype), request.intermediate_size
    up = stored("dense", inner * (2 if request.gated else 1), request.hidden_size, 10, dtype=dtype)
    down = stored("dense", request.hidden_size, inner, 20, dtype=dtype)
    if "bias" in request.needs:
        up = replace(up, bias=draw(5, up.weight.shape[1], dtype=dtype, seed=31))
        down = replace(down, bias=draw(5, down.weight.shape[1], dtype=dtype, seed=32))
    return up, down


FEW = pytest.mark.parametrize("few", [False, True], ids=["sorted", "few"])


@FEW
@pytest.mark.parametrize("kind", ["random", "few", "one"])
@pytest.mark.parametrize("rows", [1, 3, 17, 40])
def test_rows_go_to_their_experts(rows: int, kind: str, few: bool) -> None:
    assert run(BASE, rows, *plain(BASE), kind, few=few) < BOUNDS[torch.float32]


def test_a_narrow_type() -> None:
    """The interpreter multiplies bfloat16 numbers as the integers that hold them: that type is for devices."""
    request = replace(BASE, dtype="float16")
    assert run(request, 9, *plain(request)) < 2 * BOUNDS[torch.float16]


@FEW
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2", "relu"])
def test_activations(activation: str, gated: bool, few: bool) -> None:
    request = replace(BASE, activation=activation, gated=gated)
    assert run(request, 6, *plain(request), few=few) < BOUNDS[torch.float32]


@FEW
@pytest.mark.parametrize(
    ("activation", "alpha", "limit"),
    [("swiglu_oai", 1.5, 2.0), ("swiglu_step", 0.0, 0.5), ("situ", 1.5, 0.5), ("situ", 1.5, 0.0)],
)
def test_bounded_activations_with_biases(activation: str, alpha: float, limit: float, few: bool) -> None:
    request = replace(BASE, activation=activation, needs=frozenset({"bias"}), alpha=alpha, limit=limit)
    assert run(request, 7, *plain(request), few=few) < BOUNDS[torch.float32]


@FEW
@pytest.mark.parametrize(("hidden", "inner"), [(1, 1), (33, 17), (64, 96)])
def test_odd_sizes(hidden: int, inner: int, few: bool) -> None:
    request = replace(BASE, hidden_size=hidden, intermediate_size=inner)
    assert run(request, 5, *plain(request), few=few) < BOUNDS[torch.float32]


@FEW
@pytest.mark.parametrize("bias", [False, True])
def test_pairs_without_an_expert_add_nothing(few: bool, bias: bool) -> None:
    request = replace(BASE, needs=frozenset({"partial", *(["bias"] if bias else [])}))
    experts = choices(9, request)
    experts[::2, 0] = -1
    experts[4] = -1
    assert run(request, 9, *plain(request), experts=experts, few=few) < BOUNDS[torch.float32]


@pytest.mark.parametrize("swizzle", [1, 3])
def test_tiles_of_other_sizes_for_both_products(swizzle: int) -> None:
    launches = (Launch(16, 16, 16, swizzle, 4, 2), Launch(32, 64, 32, swizzle, 4, 2))
    assert run(BASE, 50, *plain(BASE), launches=launches) < BOUNDS[torch.float32]


@pytest.mark.parametrize("layout", ["dense", "fp8"])
@pytest.mark.parametrize("hidden", [64, 48])
def test_weights_by_the_copy_engine(layout: str, hidden: int) -> None:
    """Tiles that stick out of an expert's rows read its neighbour's, which nothing is made of."""
    request = replace(BASE, kind=layout, hidden_size=hidden, intermediate_size=40)
    launch = Launch(16, 32, 16, 1, 4, 2, tma=True)
    up, down = stored(layout, 80, hidden, 10), stored(layout, hidden, 40, 20)
    assert run(request, 21, up, down, launches=(launch, replace(launch, depth=8))) < BOUNDS[torch.float32]


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("fp8", {}),
    ("fp8", {"group": 32, "blocks": 16}),
    ("int8", {}),
    ("int8", {"group": 32}),
    ("int4", {}),
    ("int4", {"group": 16}),
    ("int4", {"group": 32, "zero": True}),
    ("mxfp4", {}),
]


@FEW
@pytest.mark.parametrize(("layout", "how"), LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_layouts(layout: str, how: dict[str, Any], dtype: str, few: bool) -> None:
    request = replace(BASE, kind=layout, hidden_size=64, intermediate_size=32, dtype=dtype)
    up, down = stored(layout, 64, 64, 10, **how), stored(layout, 64, 32, 20, **how)
    assert run(request, 7, up, down, few=few) < 2 * BOUNDS[getattr(torch, dtype)]


def test_eight_bits_on_both_sides() -> None:
    request = replace(BASE, kind="fp8", hidden_size=64, intermediate_size=32)
    up, down = stored("fp8", 64, 64, 10), stored("fp8", 64, 32, 20)
    # The rows between the products are rounded to eight bits too.
    assert run(request, 7, up, down, narrow=True) < 0.04


@pytest.mark.parametrize(("rows", "tile"), [(1, 16), (5, 16), (100, 16), (100, 64), (3000, 32), (7000, 64)])
def test_sorting(rows: int, tile: int) -> None:
    experts = choices(rows, BASE)
    experts[rows // 2] = -1
    found = sort_pairs(experts, 5, tile)
    owners, order = found.owners.tolist(), found.order.view(-1, tile).tolist()
    flat = experts.flatten().tolist()
    for expert in range(5):
        pairs = [pair for owner, block in zip(owners, order, strict=True) if owner == expert for pair in block]
        wanted = [pair for pair, other in enumerate(flat) if other == expert]
        assert pairs == wanted + [len(flat)] * (-len(wanted) % tile)
    assert owners == sorted(owners, key=lambda owner: (owner < 0, owner))


@pytest.mark.parametrize("rows", [FEW_ROWS, FEW_ROWS + 1])
def test_the_backend_takes_strided_rows_and_none(rows: int) -> None:
    backend = TritonExperts(BASE)
    up, down = plain(BASE)
    wide = draw(rows, 2 * 48, dtype=torch.float32)
    weights, experts = draw(rows, 2, dtype=torch.float32), choices(rows, BASE)
    for x in (wide[:, ::2], wide[:, :48]):
        found = backend.apply(x, up, down, weights, experts)
        wanted = naive(BASE, x, up, down, weights, experts)
        assert float((found.double() - wanted).norm() / wanted.norm()) < BOUNDS[torch.float32]
    assert backend.apply(wide[:0, :48], up, down, weights[:0], experts[:0]).shape == (0, 48)


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, check=False, env=environment, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_launches_compile_and_fit_the_device(compiled: list[dict[str, Any]]) -> None:
    kernels = {"count", "place", "experts", "sum", "few_up", "few_down"}
    assert {row["kernel"] for row in compiled} == {f"{name}_kernel" for name in kernels}
    assert all(row["waits"] == 1 and not row["loads_before"] + row["stores_before"] for row in compiled)
    assert [row for row in compiled if row["shared_bytes"] > SHARED_LIMIT or row["spilled_bytes"]] == []
    assert all(row["wgmma"] or row["mma"] for row in compiled if row["kernel"] == "experts_kernel")


def main() -> None:
    """Compile what is launched for a model of 128 experts."""
    import triton
    from ahead_of_time import POINTERS, Compiler

    POINTERS.update({"int8": "*i8", "uint8": "*u8"})
    compiler = Compiler(90)
    triton.runtime.JITFunction.run = lambda self, *args, **options: compiler(self, *args, **options)
    base = replace(BASE, num_experts=4, top_k=8, hidden_size=256, intermediate_size=128, dtype="bfloat16")
    for layout, rows, narrow in [("dense", 1, False), ("dense", 64, False), ("dense", 2048, False)] + [
        (layout, rows, layout == "fp8" and rows > 1)
        for layout in ("fp8", "int8", "int4", "mxfp4")
        for rows in (1, 2048)
    ]:
        compiler.label = f"{layout} {rows}"
        request = replace(base, kind=layout)
        launch = default_launch(rows * 8, 128, 2, layout)
        how: dict[str, Any] = {"dtype": torch.bfloat16, "experts": 4}
        up, down = stored(layout, 256, 256, 1, **how), stored(layout, 256, 128, 2, **how)
        x = torch.zeros(rows, 256, dtype=torch.bfloat16)
        given = quantize_rows(x) if narrow else x
        experts, weights = torch.zeros(rows, 8, dtype=torch.int64), torch.zeros(rows, 8)
        routed = (weights, experts)
        run_experts(request, (launch, launch), given, up, down, *routed, torch.bfloat16, "silu", pdl=True)
        if rows == 1:
            few_experts(request, few_launch(rows, layout), x, up, down, *routed, "silu", pdl=True)
    sys.stdout.writelines(json.dumps(row) + "\n" for row in compiler.rows)


if __name__ == "__main__":
    main()
