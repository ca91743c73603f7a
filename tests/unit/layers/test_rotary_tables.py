"""Rotary tables and rotation against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from jackfield.errors import ConfigError
from jackfield.layers.functional import rotary
from jackfield.layers.rotary import Rotary, scaled_frequencies

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALINGS: list[dict[str, Any] | None] = [None, {"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3]


def reference(theta: float, scaling: dict[str, Any] | None, size: int) -> Any:
    parameters = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    return LlamaConfig(
        hidden_size=size * 4,
        num_attention_heads=4,
        head_dim=size,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"] if s else "none")
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("size", [8, 64, 128])
def test_tables_and_rotation_are_those_of_transformers(theta: float, scaling: dict[str, Any] | None, size: int) -> None:
    module = LlamaRotaryEmbedding(reference(theta, scaling, size))
    torch.testing.assert_close(scaled_frequencies(size, theta, scaling), module.inv_freq, rtol=1e-6, atol=0)
    positions = torch.tensor([0, 1, 5, 17, 200])
    heads = torch.randn(len(positions), 3, size, generator=torch.Generator().manual_seed(1))
    cos, sin = module(heads, positions.unsqueeze(0))
    expected, _ = apply_rotary_pos_emb(heads.transpose(0, 1).unsqueeze(0), heads.transpose(0, 1).unsqueeze(0), cos, sin)
    table = Rotary(size, theta, scaling, 256, CPU)
    got = rotary(heads.clone(), table(positions))
    torch.testing.assert_close(got, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scaling", [LLAMA3, {"rope_type": "linear", "factor": 2.5}], ids=["llama3", "linear"])
def test_scaling_equals_the_function_of_transformers(scaling: dict[str, Any]) -> None:
    config = reference(10000.0, scaling, 64)
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, CPU)
    assert factor == 1.0
    torch.testing.assert_close(scaled_frequencies(64, 10000.0, scaling), frequencies, rtol=1e-6, atol=0)


def test_the_older_key_of_the_scaling_type_is_read() -> None:
    old = scaled_frequencies(16, 1e4, {"type": "linear", "factor": 2.0})
    torch.testing.assert_close(old * 2, scaled_frequencies(16, 1e4, None))


def test_a_table_of_factors_divides_each_frequency() -> None:
    factors = [1.0, 2.0, 4.0, 8.0]
    got = scaled_frequencies(8, 1e4, {"rope_type": "factors", "factors": factors})
    torch.testing.assert_close(got * torch.tensor(factors), scaled_frequencies(8, 1e4, None))


def test_an_unknown_scaling_names_its_neighbour() -> None:
    with pytest.raises(ConfigError) as caught:
        scaled_frequencies(8, 1e4, {"rope_type": "llama4"})
    assert caught.value.message == "rotary scaling 'llama4' is not known"
    assert caught.value.field == "rope_scaling.rope_type"
    assert caught.value.remedy == "did you mean 'llama3'?"
