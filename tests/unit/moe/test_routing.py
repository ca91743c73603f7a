"""Methods of routing that test_moe_layer.py does not have, against choices written out by hand and against loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from jackfield.errors import CheckpointError
from jackfield.interfaces import MoEConfig
from jackfield.layers.routing import check_routing, route

BASE = MoEConfig(num_experts=8, top_k=2, hidden_size=4, intermediate_size=4)


def logits(tokens: int = 40, experts: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))


def test_the_bias_chooses_and_does_not_weigh() -> None:
    config = replace(BASE, scoring="sigmoid", renormalize=False)
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0, 4.0])
    weights, experts = route(logits(), config, bias)
    assert experts.tolist() == [[6, 7]] * 40
    assert torch.equal(weights, logits().sigmoid()[:, 6:])


def test_groups_by_their_best_and_by_their_two_best() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.6, 0.2, 0.3, 0.1, 0.1]])
    config = replace(BASE, scoring="sigmoid", num_groups=4, top_groups=1, renormalize=False)
    given = torch.logit(scores)
    assert route(given, replace(config, group_score="max"))[1].tolist() == [[0, 1]]
    weights, experts = route(given, replace(config, group_score="top2", scale=2.5))
    assert experts.tolist() == [[2, 3]]
    assert weights.tolist() == [pytest.approx([1.5, 1.5])]


def test_scores_of_groups_have_the_bias_in_them() -> None:
    config = replace(BASE, scoring="sigmoid", num_groups=4, top_groups=2, group_score="top2")
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0])
    _, experts = route(logits(), config, bias)
    assert int(experts.max()) <= 3


@pytest.mark.parametrize("scoring", ["softmax", "softmax_chosen"])
def test_softmax_before_the_choice_and_made_to_sum_to_one_is_softmax_after_it(scoring: str) -> None:
    weights, experts = route(logits(), replace(BASE, scoring=scoring, renormalize=scoring == "softmax"))
    best = logits().topk(2)
    assert torch.equal(experts, best.indices)
    torch.testing.assert_close(weights, best.values.softmax(-1))


def test_one_expert_with_a_sigmoid_behind_the_choice() -> None:
    # A sigmoid in front would find both to be 1.
    given = torch.tensor([[40.0, 50.0, 0.0]])
    config = replace(BASE, num_experts=3, top_k=1, scoring="sigmoid_chosen", renormalize=False)
    weights, experts = route(given, config)
    assert (weights.tolist(), experts.tolist()) == ([[1.0]], [[1]])


def test_the_root_of_softplus() -> None:
    weights, experts = route(logits(), replace(BASE, scoring="sqrtsoftplus", renormalize=False))
    wanted = torch.log1p(torch.exp(logits())).sqrt()
    torch.testing.assert_close(weights, wanted.gather(1, experts))
    assert torch.equal(experts, logits().topk(2).indices)


def test_logits_that_are_the_weights() -> None:
    """Top-k and nothing else; a bias still chooses alone."""
    config = replace(BASE, scoring="none", renormalize=False, scale=2.0)
    weights, experts = route(logits(), config)
    best = logits().topk(2)
    assert torch.equal(experts, best.indices) and torch.equal(weights, 2.0 * best.values)
    bias = torch.tensor([9.0, 8.0, *[0.0] * 6])
    weights, experts = route(logits(), config, bias)
    assert experts.sort(1).values.tolist() == [[0, 1]] * 40
    assert torch.equal(weights, 2.0 * logits().gather(1, experts))


def naive_v4(given: list[float], bias: list[float], scale: float) -> dict[int, float]:
    """Return weights by expert of one token: roots of softplus, a bias of the choice, and a sum of 1 (DeepSeek-V4)."""
    scores = [math.sqrt(math.log1p(math.exp(x))) for x in given]
    chosen = sorted(range(len(given)), key=lambda e: (-(scores[e] + bias[e]), e))[:2]
    return {e: scores[e] / sum(scores[c] for c in chosen) * scale for e in chosen}


def naive_sigmoid(given: list[float], bias: list[float], scale: float) -> dict[int, float]:
    """Return the same of sigmoids (MiniMax-M2, GLM-4.5)."""
    scores = [1 / (1 + math.exp(-x)) for x in given]
    chosen = sorted(range(len(given)), key=lambda e: (-(scores[e] + bias[e]), e))[:2]
    return {e: scores[e] / sum(scores[c] for c in chosen) * scale for e in chosen}


@pytest.mark.parametrize(("scoring", "naive"), [("sqrtsoftplus", naive_v4), ("sigmoid", naive_sigmoid)])
def test_scores_with_a_bias_made_to_sum_to_a_scale(scoring: str, naive: Any) -> None:
    bias = torch.linspace(0.4, -0.4, 8)
    config = replace(BASE, scoring=scoring, scale=1.5)
    weights, experts = route(logits(), config, bias)
    for row, given in enumerate(logits().double().tolist()):
        wanted = naive(given, bias.double().tolist(), 1.5)
        assert experts[row].tolist() == list(wanted)
        assert weights[row].tolist() == pytest.approx(list(wanted.values()), abs=1e-6)


def test_sparsemixer_equals_its_paper_written_out_for_one_token() -> None:
    given = torch.tensor([[2.0, 1.9, -1.0, 1.0]])
    config = replace(BASE, num_experts=4, scoring="sparsemixer", jitter=0.1)
    weights, experts = route(given, config)
    # Of 2.0, a fifth below is near: 1.9 is, 1.0 is not. Then of 1.9, which is alone.
    assert experts.tolist() == [[0, 1]]
    assert weights[0, 0].item() == pytest.approx(1 / (1 + 2.718281828**-0.1))
    assert weights[0, 1].item() == pytest.approx(1.0)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_chosen", "sqrtsoftplus", "sparsemixer", "none"])
def test_ties_go_to_the_lower_index(scoring: str) -> None:
    config = replace(BASE, num_experts=64, top_k=4, scoring=scoring, num_groups=1)
    assert route(torch.ones(3, 64), config)[1].tolist() == [[0, 1, 2, 3]] * 3


def test_ties_of_groups_go_to_the_lower_index() -> None:
    config = replace(BASE, num_groups=4, top_groups=2, top_k=4)
    assert route(torch.ones(2, 8), config)[1].tolist() == [[0, 1, 2, 3]] * 2


def test_everything_is_computed_in_float32() -> None:
    given = logits().bfloat16()
    weights, experts = route(given, BASE)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, route(given.float(), BASE)[0])
    assert experts.dtype == torch.int64


def test_weights_of_zero_do_not_become_nan() -> None:
    weights, _ = route(torch.full((1, 8), -200.0), replace(BASE, scoring="sigmoid"))
    assert weights.tolist() == [[0.0, 0.0]]


def test_a_way_of_ones_own() -> None:
    def last(given: torch.Tensor, config: MoEConfig, bias: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(len(given), 1), torch.full((len(given), 1), config.num_experts - 1)

    assert route(logits(2), replace(BASE, route=last))[1].tolist() == [[7], [7]]


def test_simulated_routing_is_spread_as_it_says() -> None:
    given = torch.zeros(2000, 8)
    uniform = route(given, replace(BASE, scoring="simulated_uniform"))[1]
    skewed = route(given, replace(BASE, scoring="simulated_skewed"))[1]
    assert torch.equal(uniform, route(given + 1, replace(BASE, scoring="simulated_uniform"))[1])
    counts = torch.bincount(uniform.flatten(), minlength=8)
    assert int(counts.min()) > 400 and int(counts.max()) < 600
    counts = torch.bincount(skewed.flatten(), minlength=8)
    assert int(counts[0]) > 3 * int(counts[7]) > 0
    assert all(len(set(row)) == 2 for row in skewed.tolist())


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"top_k": 9}, "9 of 8 experts cannot be chosen"),
    ({"scoring": "softmx"}, "the scoring 'softmx' is not known"),
    ({"num_groups": 3}, "8 experts are not 3 equal groups"),
    ({"num_groups": 4, "top_groups": 1, "top_k": 3}, "1 of 4 groups do not have 3 experts"),
    ({"num_groups": 8, "top_groups": 4, "group_score": "top2"}, "groups of one expert have no two best"),
    ({"scoring": "none"}, "logits that are weights have no sum that they could be divided by"),
    ({"group_score": "mean"}, "the score of groups 'mean' is not known"),
    ({"top_k": 0, "scoring": "x"}, "the scoring 'x' is not known; 0 of 8 experts cannot be chosen"),
]


@pytest.mark.parametrize(("changes", "text"), WRONG, ids=range(len(WRONG)))
def test_blocks_that_cannot_be_routed(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_routing(replace(BASE, **changes))
    assert caught.value.message == f"tokens cannot be routed: {text}"


def test_close_names_of_scorings() -> None:
    with pytest.raises(CheckpointError) as caught:
        check_routing(replace(BASE, scoring="softmx"))
    assert caught.value.remedy == "did you mean 'softmax'?"
