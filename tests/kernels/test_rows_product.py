"""Products of many rows: what is launched, against float64 by way of a stand-in for the kernel, and that the kernel
compiles for capability 9.0; the kernel itself runs on such a device alone (``tests/device``). Run as a program, without
the interpreter, this file writes one JSON object per compiled kernel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from op_checks import BOUNDS, draw

from jackfield.interfaces import DeviceFacts, ExpertsRequest
from jackfield.interfaces.moe import ExpertMatrices
from jackfield_moe.gluon_experts import GluonExperts
from jackfield_moe.triton_launch import sort_pairs
from jackfield_triton.rows_product import BLOCK, Grouping, has_wide_groups, rows_product

SHARED_LIMIT = 227 * 1024
CORES = 4
BASE = ExpertsRequest(num_experts=5, top_k=2, hidden_size=64, intermediate_size=48, dtype="float16", kind="dense")


class StandIn:
    """Does in float64 what ``rows_kernel`` says that it does, from the arguments of a launch; it notes launches."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.bases: list[torch.Tensor] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.run(grid, *args, **options)

    def run(
        self,
        grid: tuple[int, ...],
        x: Any,
        weight: Any,
        out: Any,
        factors: torch.Tensor,
        order: torch.Tensor,
        owners: torch.Tensor,
        pairs: int,
        blocks: int,
        parts: int,
        steps: int,
        x_row: int,
        **how: Any,
    ) -> None:
        self.launches.append({"grid": grid, "parts": parts, "steps": steps, **how})
        self.bases.append(x if how["GATHER"] else x.base)
        outputs = out.base.shape[1]
        matrices = weight.base.double().cpu()
        for block in range(blocks):
            owner = int(owners[block]) if how["OWNED"] else 0
            if owner < 0:
                continue
            first = block * BLOCK
            numbers = order.view(-1)[first : first + BLOCK].tolist() if how["OWNED"] else range(first, first + BLOCK)
            for place, pair in enumerate(numbers, first):
                if pair >= pairs:
                    continue
                if how["GATHER"]:
                    at = pair // how["CHOSEN"] * x_row + x.storage_offset()
                    row = torch.as_strided(x, (steps * 64,), (1,), at).double()
                else:
                    row = x.base[place].double()
                found = matrices[2 * owner] @ row if how["GATED"] else matrices[owner] @ row
                if how["GATED"]:
                    found = torch.nn.functional.silu(found) * (matrices[2 * owner + 1] @ row)
                if how["WEIGH"]:
                    found = found * factors[pair]
                assert parts * (128 if how["GATED"] else 256) >= outputs
                out.base[place] = found.to(out.base.dtype)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = ModuleType("jackfield_triton.gluon_rows_kernels")
    found = StandIn()
    module.rows_kernel = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


@pytest.mark.parametrize("rows", [1, 64, 200])
@pytest.mark.parametrize("gated", [False, True])
def test_one_matrix(stand_in: StandIn, rows: int, gated: bool) -> None:
    x, weight = draw(rows, 72, dtype=torch.float16, seed=1), draw(1, 272, 72, dtype=torch.float16, seed=2)
    out = x.new_full((rows, 136 if gated else 272), float("nan"))
    assert rows_product(x, weight, out, CORES, activation="silu" if gated else "") is out
    expected = x.double() @ weight[0].double().T
    if gated:
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    assert float((out.double() - expected).norm() / expected.norm()) < BOUNDS[torch.float16]
    (launch,) = stand_in.launches
    assert (launch["parts"], launch["steps"]) == (2, 2)
    assert launch["grid"] == (min(CORES, -(-rows // BLOCK) * 2),)


@pytest.mark.parametrize("cut", [slice(1, 73), slice(0, 144, 2)])
def test_rows_that_the_copy_engine_cannot_read_are_copied(stand_in: StandIn, cut: slice) -> None:
    x, weight = draw(9, 145, dtype=torch.float16, seed=1)[:, cut], draw(1, 16, 72, dtype=torch.float16, seed=2)
    out = rows_product(x, weight, x.new_empty((9, 16)), CORES)
    expected = x.double() @ weight[0].double().T
    assert float((out.double() - expected).norm() / expected.norm()) < BOUNDS[torch.float16]
    assert stand_in.bases[0].is_contiguous() and stand_in.bases[0].data_ptr() % 16 == 0


@pytest.mark.parametrize("kind", ["random", "one", "none", "partial"])
def test_blocks_of_experts(stand_in: StandIn, kind: str) -> None:
    rows, chosen = 500, 2
    generator = torch.Generator().manual_seed(3)
    experts = torch.rand(rows, 5, generator=generator).topk(chosen, 1).indices
    if kind == "one":
        experts[:, 0], experts[:, 1] = 2, 4
    if kind == "none":
        experts = torch.where(experts == 3, 4, experts)
    needs = frozenset({"partial"}) if kind == "partial" else frozenset()
    if kind == "partial":
        experts[::3, 1] = -1
    request = ExpertsRequest(
        num_experts=5, top_k=2, hidden_size=64, intermediate_size=48, dtype="float16", kind="dense", needs=needs
    )
    x = draw(rows, 128, dtype=torch.float16, seed=4)[:, :64]
    up, down = draw(5, 96, 64, dtype=torch.float16, seed=5), draw(5, 64, 48, dtype=torch.float16, seed=6)
    weights = torch.rand(rows, chosen, generator=generator)
    backend = GluonExperts(request)
    backend._cores = CORES  # as on a device
    found = backend.apply(x, ExpertMatrices("dense", up), ExpertMatrices("dense", down), weights, experts)
    expected = torch.zeros(rows, 64, dtype=torch.float64)
    for row in range(rows):
        for weight, expert in zip(weights[row].tolist(), experts[row].tolist(), strict=True):
            if expert >= 0:
                gate, other = (up[expert].double() @ x[row].double()).chunk(2)
                inner = (torch.nn.functional.silu(gate) * other).half().double()
                expected[row] += weight * (down[expert].double() @ inner)
    assert float((found.double() - expected).norm() / expected.norm()) < BOUNDS[torch.float16]
    first, second = stand_in.launches
    assert (first["GATHER"], first["GATED"], first["WEIGH"], first["CHOSEN"]) == (True, True, False, 2)
    assert (second["GATHER"], second["GATED"], second["WEIGH"], second["CHOSEN"]) == (False, False, True, 1)


def test_places_say_where_pairs_are() -> None:
    experts = torch.tensor([[0, 3], [3, 1], [-1, 3], [1, 0]])
    blocks = sort_pairs(experts, 5, 2, places=True)
    assert blocks.places is not None
    order, flat = blocks.order.tolist(), experts.flatten().tolist()
    assert [order[place] for pair, place in enumerate(blocks.places.tolist()) if flat[pair] >= 0] == [
        pair for pair, expert in enumerate(flat) if expert >= 0
    ]
    assert sort_pairs(experts, 5, 2).places is None


def test_few_rows_go_where_they_went(stand_in: StandIn) -> None:
    backend = GluonExperts(BASE)
    backend._cores = CORES
    x = draw(backend.kernel_rows()[-1] - 1, 64, dtype=torch.float16, seed=4)
    up, down = draw(5, 96, 64, dtype=torch.float16, seed=5), draw(5, 64, 48, dtype=torch.float16, seed=6)
    experts = torch.zeros(len(x), 2, dtype=torch.int64)
    experts[:, 1] = 1
    backend.apply(x, ExpertMatrices("dense", up), ExpertMatrices("dense", down), torch.ones(len(x), 2), experts)
    assert stand_in.launches == []


REJECTED = {
    "capability": {"device": DeviceFacts("cuda", capability=(10, 0))},
    "activation": {"activation": "relu2"},
    "hidden_size": {"hidden_size": 96},
    "intermediate_size": {"intermediate_size": 44},
}


@pytest.mark.parametrize("code", REJECTED)
def test_limits(code: str) -> None:
    facts = {"device": DeviceFacts("cuda", capability=(9, 0)), **REJECTED[code]}
    names = ("num_experts", "top_k", "hidden_size", "intermediate_size", "dtype", "kind")
    found = GluonExperts.check(ExpertsRequest(**{**{name: getattr(BASE, name) for name in names}, **facts}))
    assert [reason.code for reason in found] == [code]


def test_other_devices_have_other_matrix_instructions() -> None:
    assert has_wide_groups((9, 0))
    assert not any(has_wide_groups(capability) for capability in ((0, 0), (8, 9), (10, 0), (12, 0)))


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, check=False, env=environment, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_launches_compile_and_fit_the_device(compiled: list[dict[str, Any]]) -> None:
    assert {(row["case"], row["pdl"]) for row in compiled} == {
        (case, pdl) for case in ("dense", "dense, gated", "experts, up", "experts, down") for pdl in (False, True)
    }
    assert all(row["wgmma"] and not row["mma"] for row in compiled)
    assert [row for row in compiled if row["spilled_bytes"] or row["shared_bytes"] > SHARED_LIMIT] == []
    assert all((row["waits"], row["releases"]) == ((1, 1) if row["pdl"] else (0, 0)) for row in compiled)
    assert all(row["loads_before"] == row["stores_before"] == 0 for row in compiled if row["pdl"])


def main() -> None:
    """Compile what is launched for sizes of published models."""
    import triton
    from ahead_of_time import Compiler

    compiler, kind = Compiler(90), torch.bfloat16
    triton.runtime.JITFunction.run = lambda self, *args, **options: compiler(self, *args, **options)
    order, owners = torch.zeros(8, BLOCK, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    x, weight = torch.zeros(1024, 2048, dtype=kind), torch.zeros(4, 1536, 2048, dtype=kind)
    inner, down = torch.zeros(1024, 768, dtype=kind), torch.zeros(4, 2048, 768, dtype=kind)
    grouping = Grouping(order, owners, 1000, 8)
    for pdl in (False, True):
        compiler.label = "dense"
        rows_product(inner, down[:1], x, 132, pdl=pdl)
        compiler.label = "dense, gated"
        rows_product(x, weight[:1], inner, 132, activation="silu", pdl=pdl)
        compiler.label = "experts, up"
        rows_product(x, weight, inner, 132, grouping=grouping, activation="silu", pdl=pdl)
        compiler.label = "experts, down"
        back, factors = Grouping(order, owners, 1000), torch.zeros(1000)
        rows_product(inner, down, x, 132, grouping=back, factors_P=factors, pdl=pdl)
    sys.stdout.writelines(json.dumps(row) + "\n" for row in compiler.rows)


if __name__ == "__main__":
    main()
