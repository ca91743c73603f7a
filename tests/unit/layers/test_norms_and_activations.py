"""Norms and activations of all models, against torch and transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer_world import build_plan, fill
from transformers.activations import ACT2FN
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from jackfield.distributed import SingleCommunicator
from jackfield.errors import CheckpointError, ConfigError
from jackfield.interfaces import OutputShard
from jackfield.layers.activation import GATED, PLAIN
from jackfield.layers.builder import LayerBuilder
from jackfield.layers.functional import soft_cap

EPS = 1e-5
HEADS = OutputShard("q", 24, unit=6)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def builder() -> LayerBuilder:
    return LayerBuilder(build_plan(SingleCommunicator()))


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_layer_norms_with_and_without_parameters(weight: bool, bias: bool, offset: float) -> None:
    norm = builder().norm("norm", 8, EPS, kind="layer", weight=weight, bias=bias, offset=offset)
    tensors = {name: numbers(8, seed=i) for i, name in enumerate(("weight", "bias")) if (weight, bias)[i]}
    fill(norm, tensors)
    x, residual = numbers(5, 8, seed=3) + 2, numbers(5, 8, seed=4)
    scale = tensors["weight"] + offset if weight else None
    close(norm(x), F.layer_norm(x, (8,), scale, tensors.get("bias"), EPS))
    normed, total = norm.add(x, residual)
    close(total, x + residual)
    close(normed, F.layer_norm(x + residual, (8,), scale, tensors.get("bias"), EPS))


def test_a_root_mean_square_norm_without_a_weight_has_ones() -> None:
    norm = builder().norm("norm", 8, EPS, weight=False)
    assert norm.unfilled() == [] and not list(norm.parameters())
    close(norm(numbers(5, 8)), F.rms_norm(numbers(5, 8), (8,), None, EPS))


def test_a_norm_over_a_whole_projection() -> None:
    norm = builder().norm("q_norm", 24, EPS, over=HEADS)
    weight, x = numbers(24, seed=1), numbers(5, 4, 6, seed=2)
    fill(norm, {"weight": weight})
    reference = Olmo2RMSNorm(24, EPS)
    reference.weight.data = weight
    close(norm(x), reference(x.flatten(1)).view_as(x))


def test_a_norm_with_a_weight_for_each_head() -> None:
    norm = builder().norm("q_norm", 6, EPS, kind="layer", over=HEADS)
    weight, x = numbers(4, 6, seed=1), numbers(5, 4, 6, seed=2) + 1
    fill(norm, {"weight": weight})
    reference = CohereLayerNorm((4, 6), EPS)
    reference.weight.data = weight
    close(norm(x), reference(x))


def test_a_norm_whose_heads_are_modules_of_their_own() -> None:
    norm = builder().norm("q_norm", 6, EPS, kind="layer", over=HEADS)
    weight, x = numbers(4, 6, seed=1), numbers(5, 4, 6, seed=2)
    for head in (2, 0, 1):
        assert norm.load(str(head), "weight", weight[head])
    assert norm.unfilled() == ["q_norm.weight"]
    assert norm.load("3", "weight", weight[3])
    assert norm.unfilled() == []
    close(norm(x), torch.stack([F.layer_norm(x[:, i], (6,), weight[i], None, EPS) for i in range(4)], 1))


def test_a_norm_over_heads_takes_only_its_own_weight() -> None:
    norm = builder().norm("q_norm", 6, EPS, over=HEADS)
    assert not norm.load("", "bias", torch.ones(24))
    with pytest.raises(CheckpointError, match=r"does not fit q_norm\.weight"):
        norm.load("", "weight", torch.ones(30))


@pytest.mark.parametrize("name", PLAIN)
def test_activations_are_those_of_transformers(name: str) -> None:
    x = numbers(40, 12) * 4
    reference: Any = ACT2FN["gelu_pytorch_tanh" if name == "gelu_tanh" else name]
    close(builder().activation(name, gated=False)(x), reference(x))
    gate, up = x.chunk(2, -1)
    close(builder().activation(name)(x), reference(gate) * up)


def test_every_activation_of_transformers_that_has_no_parameters_is_known() -> None:
    assert set(ACT2FN) - set(PLAIN) == {"prelu", "xielu"}
    assert set(GATED) <= set(PLAIN)


@pytest.mark.parametrize("gated", [True, False])
def test_an_unknown_activation_names_its_neighbour(gated: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        builder().activation("gelu_fest", gated=gated)
    assert caught.value.message == "the activation 'gelu_fest' is not known"
    assert "did you mean 'gelu_fast'" in caught.value.remedy


def test_a_soft_cap_leaves_small_numbers_and_bounds_large_ones() -> None:
    x = torch.tensor([-1e4, -3.0, 0.0, 1e-3, 3.0, 1e4])
    capped = soft_cap(x.clone(), 2.0)
    close(capped, 2.0 * torch.tanh(x / 2.0))
    assert capped.abs().max() <= 2.0
