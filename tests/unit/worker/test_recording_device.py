"""The recording device itself: replays follow their inputs, and what a device refuses is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recording_platform import Graphs


def record(work: Callable[[], Any]) -> tuple[Graphs, Any]:
    graphs = Graphs()
    graph = graphs.begin(graphs.new_pool())
    try:
        work()
    finally:
        graphs.end(graph)
    return graphs, graph


@torch.inference_mode()
def test_a_replay_computes_again_into_the_same_tensors() -> None:
    x, table, results = torch.tensor([1.0, 2.0]), torch.zeros(4), {}

    def work() -> None:
        half = x.view(2, 1)[:1]
        results["sum"] = (x * 2 + 1).softmax(0).cumsum(0)
        results["view"] = (half + 1).expand(3, 1)
        table[torch.tensor([3])] = x.sum()
        x.mul_(2)

    graphs, graph = record(work)
    out, view = results["sum"], results["view"]
    x.copy_(torch.tensor([5.0, 3.0]))
    graphs.replay(graph)
    torch.testing.assert_close(out, torch.tensor([11.0, 7.0]).softmax(0).cumsum(0))
    assert view.tolist() == [[6.0]] * 3 and table.tolist() == [0, 0, 0, 8.0] and x.tolist() == [10.0, 6.0]


@torch.inference_mode()
def test_memory_that_nobody_wrote_is_not_a_number() -> None:
    made: list[torch.Tensor] = []
    graphs, graph = record(lambda: made.append(torch.empty(3)))
    graphs.replay(graph)
    assert made[0].isnan().all()


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.unique(x),
    ],
)
@torch.inference_mode()
def test_what_makes_the_host_wait_is_refused(work: Callable[[torch.Tensor], Any]) -> None:
    x = torch.tensor([1.0, 0.0])
    with pytest.raises(AssertionError, match="cannot be recorded"):
        record(lambda: work(x))
