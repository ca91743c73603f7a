"""Routing in Triton against the torch reference, which unit tests hold against loops over single tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from jackfield.interfaces import MoEConfig
from jackfield.layers.routing import SCORES, route
from jackfield_ops.triton_route import route_experts

BASE = MoEConfig(num_experts=12, top_k=3, hidden_size=8, intermediate_size=8)
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "not_renormalized": {"renormalize": False, "scale": 2.5},
    "one": {"top_k": 1},
    "many": {"num_experts": 160, "top_k": 8},
    "best_of_groups": {"num_groups": 4, "top_groups": 2},
    "two_best_of_groups": {"num_groups": 3, "top_groups": 2, "group_score": "top2", "scale": 2.5},
    "groups_of_twenty": {"num_experts": 160, "num_groups": 8, "top_groups": 3, "top_k": 6},
}


def same(logits: torch.Tensor, config: MoEConfig, bias: torch.Tensor | None = None) -> None:
    weights, experts = route_experts(logits, config, bias)
    wanted_weights, wanted_experts = route(logits, config, bias)
    assert experts.dtype == torch.int64 and weights.dtype == torch.float32
    assert torch.equal(experts, wanted_experts)
    torch.testing.assert_close(weights, wanted_weights, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("scoring", list(SCORES))
def test_every_scoring_and_shape(scoring: str, shape: str, biased: bool) -> None:
    config = replace(BASE, scoring=scoring, **SHAPES[shape])
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, config.num_experts, generator=generator) * 3
    bias = torch.randn(config.num_experts, generator=generator) if biased else None
    same(logits, config, bias)


@pytest.mark.parametrize("shape", ["plain", "best_of_groups", "two_best_of_groups"])
def test_ties_go_to_the_lower_index(shape: str) -> None:
    config = replace(BASE, **SHAPES[shape])
    same(torch.zeros(2, 12), config)
    same(torch.tensor([[0.0, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0]]), config)


def test_rows_that_lie_apart_and_none_at_all() -> None:
    wide = torch.randn(6, 30, generator=torch.Generator().manual_seed(1)).half()
    same(wide[:, 4:16], BASE)
    same(wide.float().t()[:12].t(), BASE)
    same(wide[:0, :12], BASE)


def test_numbers_that_are_none_name_experts_that_exist() -> None:
    _, experts = route_experts(torch.full((2, 12), float("nan")), BASE)
    assert bool(((experts >= 0) & (experts < 12)).all())


def test_small_scores_stay_apart() -> None:
    logits = torch.linspace(-30, -10, 12).unsqueeze(0)
    config = replace(BASE, scoring="sqrtsoftplus", renormalize=False)
    same(logits, config)
    found, _ = route_experts(logits, config)
    wanted, _ = route(logits, config)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0.0)


def test_very_small_and_very_large_logits() -> None:
    for scoring in SCORES:
        same(torch.linspace(-90, 90, 12).unsqueeze(0), replace(BASE, scoring=scoring))
