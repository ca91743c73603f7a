"""Two ranks over gloo give what one rank gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import spawn
from two_ranks import MODELS, Results, alone, free_port, run_rank

NAMES = [
    "column, row",
    *(f"{kind} {rows}" for rows in (10, 11) for kind in ("embedding", "head", "tied head")),
    "experts: softmax",
    "experts: sigmoid",
    *(f"model: {name}" for name in MODELS),
    "model: normed heads",
]


@pytest.fixture(scope="module")
def one() -> Results:
    return alone()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    folder = tmp_path_factory.mktemp("ranks")
    spawn(run_rank, args=(2, free_port(), str(folder)), nprocs=2)  # type: ignore[no-untyped-call]
    return [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(2)]


def test_everything_is_compared(one: Results, two: list[Results]) -> None:
    assert set(one) == set(NAMES)
    assert all(set(rank) == {*NAMES, "broadcast", "all_gather"} for rank in two)


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_give_what_one_gives(name: str, one: Results, two: list[Results]) -> None:
    assert one[name].abs().max() > 0.1, "the result is not trivial"
    for rank in two:
        torch.testing.assert_close(rank[name], one[name], rtol=1e-5, atol=1e-5)


def test_collectives(two: list[Results]) -> None:
    for rank in two:
        assert rank["broadcast"].tolist() == [1.0, 1.0, 1.0]
        assert rank["all_gather"].tolist() == [[0.0, 1.0], [0.0, 1.0]]
