"""Routing and experts against a loop over tokens in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.distributed import SingleCommunicator
from jackfield.interfaces import ExpertsRequest, LayerInfo, MoEConfig, OutputShard, Parallel
from jackfield.layers.functional import REFERENCES
from jackfield.layers.moe import ExpertWeight, Moe, route
from jackfield_moe.torch_experts import TorchExperts
from jackfield_quantization.unquantized import Unquantized

CPU = torch.device("cpu")
BASE = MoEConfig(num_experts=6, top_k=2, hidden_size=5, intermediate_size=4)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def naive_route(logits: list[float], config: MoEConfig) -> dict[int, float]:
    """Return weights by expert of one token, chosen one at a time."""
    if config.scoring == "softmax":
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    size = len(logits) // config.num_groups
    groups = sorted(range(config.num_groups), key=lambda g: (-max(scores[g * size : (g + 1) * size]), g))
    allowed = [e for e in range(len(scores)) if e // size in groups[: config.top_groups]]
    chosen = sorted(allowed, key=lambda e: (-scores[e], e))[: config.top_k]
    share = sum(scores[e] for e in chosen) if config.renormalize else 1.0
    return {e: scores[e] / share * config.scale for e in chosen}


def naive_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: list[dict[int, float]]
) -> torch.Tensor:
    rows = []
    for token, chosen in zip(x.double(), weights, strict=True):
        total = torch.zeros(down.shape[1], dtype=torch.float64)
        for expert, weight in chosen.items():
            gate, up = (gate_up[expert].double() @ token).chunk(2)
            total += weight * (down[expert].double() @ (gate / (1 + torch.exp(-gate)) * up))
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros(0, down.shape[1], dtype=torch.float64)


CONFIGS = [
    BASE,
    replace(BASE, renormalize=False, scale=2.5),
    replace(BASE, scoring="sigmoid"),
    replace(BASE, top_k=1),
    replace(BASE, top_k=6),
    replace(BASE, num_groups=3, top_groups=1),
    replace(BASE, num_groups=2, top_groups=1, scoring="sigmoid", scale=0.5, top_k=3),
]


@settings(max_examples=60, deadline=None)
@given(
    config=st.sampled_from(CONFIGS),
    # Multiples of a half: ties must go to the smaller index.
    logits=st.lists(st.lists(st.integers(-6, 6).map(lambda x: x / 2), min_size=6, max_size=6), min_size=1, max_size=5),
)
def test_routing_equals_a_choice_one_at_a_time(config: MoEConfig, logits: list[list[float]]) -> None:
    weights, experts = route(torch.tensor(logits), config)
    assert weights.dtype == torch.float32
    for row, expected in enumerate(naive_route(token, config) for token in logits):
        assert experts[row].tolist() == list(expected)
        assert weights[row].tolist() == pytest.approx(list(expected.values()), abs=1e-6)


def build(config: MoEConfig) -> tuple[Moe, torch.Tensor, torch.Tensor]:
    """Return a block, and its weights [X, 2F, E] and [X, E, F]."""
    width, inner, count = config.hidden_size, config.intermediate_size, config.num_experts
    gate_up, down = numbers(count, 2 * inner, width, seed=1), numbers(count, width, inner, seed=2)
    shards = (OutputShard("gate", inner), OutputShard("up", inner))
    up_info = LayerInfo("moe.gate_up", width, shards, Parallel.COLUMN, role="experts", num_experts=count)
    down_info = LayerInfo("moe.down", inner, (OutputShard("", width),), Parallel.ROW, role="experts", num_experts=count)
    block = Moe(
        "moe",
        config,
        (up_info, Unquantized.scheme(up_info, None)),
        (down_info, Unquantized.scheme(down_info, None)),
        TorchExperts.build(ExpertsRequest(activation=config.activation)),
        SingleCommunicator(),
        CPU,
        ops=REFERENCES,
    )
    for expert in reversed(range(count)):
        assert block.down.load_expert(expert, "", "weight", down[expert])
        assert block.gate_up.load_expert(expert, "up", "weight", gate_up[expert, inner:])
        assert block.gate_up.load_expert(expert, "gate", "weight", gate_up[expert, :inner])
    return block, gate_up, down


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_a_block_equals_a_loop_over_tokens(config: MoEConfig, tokens: int) -> None:
    block, gate_up, down = build(config)
    x, logits = numbers(tokens, 5, seed=3), numbers(tokens, 6, seed=4)
    expected = naive_experts(x, gate_up, down, [naive_route(row, config) for row in logits.double().tolist()])
    torch.testing.assert_close(block(x, logits).double(), expected, rtol=1e-5, atol=1e-5)


def test_one_expert_that_takes_all_and_experts_that_take_none() -> None:
    config = replace(BASE, top_k=1)
    block, gate_up, down = build(config)
    x = numbers(8, 5, seed=3)
    logits = torch.full((8, 6), -50.0)
    logits[:, 4] = 50.0
    expected = naive_experts(x, gate_up, down, [{4: 1.0}] * 8)
    torch.testing.assert_close(block(x, logits).double(), expected, rtol=1e-5, atol=1e-5)


def test_missing_experts_are_reported() -> None:
    block, gate_up, _ = build(BASE)
    fresh = ExpertWeight(block.gate_up.info, block.gate_up.scheme, CPU)
    for expert in range(BASE.num_experts - 1):
        fresh.load_expert(expert, "gate", "weight", gate_up[expert, :4])
        fresh.load_expert(expert, "up", "weight", gate_up[expert, 4:])
    assert fresh.unfilled() == ["moe.gate_up.weight[gate]", "moe.gate_up.weight[up]"]
    assert fresh.load_expert(5, "gate", "scales", gate_up[5, :4]) is False
