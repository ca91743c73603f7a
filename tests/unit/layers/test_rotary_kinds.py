"""Every kind of rotary scaling against transformers' functions, and rotations of neighbouring pairs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb

from jackfield.errors import ConfigError
from jackfield.interfaces import RowOrder
from jackfield.layers.functional import rotary
from jackfield.layers.rotary import Rotary
from jackfield.layers.rotary_scaling import SCALINGS, attention_factor, scaled_frequencies
from jackfield.loader.arrange import reorder_rows

CPU = torch.device("cpu")
LONGEST, ORIGINAL = 4096, 1024
SIZE = 32
SHORT, LONG = ([1.0 + i * step for i in range(SIZE // 2)] for step in (0.01, 0.5))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": ORIGINAL,
}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn, betas": {**YARN, "beta_fast": 16, "beta_slow": 2, "factor": 16.0},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, factor given": {**YARN, "attention_factor": 1.25},
    "yarn, mscale": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn, same mscale": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "longrope": LONGROPE,
    "longrope, factor given": {**LONGROPE, "factor": 8.0},
    "longrope, attention factor given": {**LONGROPE, "attention_factor": 1.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "proportional, stretched": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 4.0},
}


def reference(kind: dict[str, Any], theta: float, length: int) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=SIZE * 4,
        num_attention_heads=4,
        head_dim=SIZE,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_theta": theta, **kind},
    )
    return ROPE_INIT_FUNCTIONS[kind["rope_type"]](config, CPU, seq_len=length)  # type: ignore[no-any-return]


@pytest.mark.parametrize("length", [ORIGINAL, LONGEST, 8 * LONGEST])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", KINDS)
def test_frequencies_and_factors_are_those_of_transformers(name: str, theta: float, length: int) -> None:
    kind = KINDS[name]
    expected, factor = reference(kind, theta, length)
    got = scaled_frequencies(SIZE, theta, kind, LONGEST, length)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=0)
    assert attention_factor(kind, LONGEST) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("name", ["dynamic", "yarn", "longrope"])
def test_tables_hold_cosines_and_sines_times_the_factor(name: str) -> None:
    length = 2 * LONGEST
    expected, factor = reference(KINDS[name], 10000.0, length)
    positions = torch.tensor([0, 3, ORIGINAL - 1, ORIGINAL, LONGEST, length - 1])
    angles = torch.outer(positions.float(), expected)
    table = Rotary(SIZE, 10000.0, KINDS[name], LONGEST, CPU, length)
    wanted = torch.cat((angles.cos(), angles.sin()), -1) * factor
    # A frequency in float32 is off by 1e-7 of itself, and an angle by that times its position.
    torch.testing.assert_close(table(positions[:2]), wanted[:2], rtol=0, atol=1e-6)
    torch.testing.assert_close(table(positions), wanted, rtol=0, atol=2e-7 * length)


def test_a_dynamic_base_starts_to_grow_behind_the_original_length() -> None:
    plain = scaled_frequencies(SIZE, 1e4, None)
    kind = {**KINDS["dynamic"], "original_max_position_embeddings": ORIGINAL}
    assert torch.equal(scaled_frequencies(SIZE, 1e4, kind, LONGEST, ORIGINAL), plain)
    assert torch.equal(scaled_frequencies(SIZE, 1e4, KINDS["dynamic"], LONGEST, LONGEST), plain)
    grown = scaled_frequencies(SIZE, 1e4, kind, LONGEST, LONGEST)
    assert bool((grown[1:] < plain[1:]).all())


def test_a_dynamic_alpha_raises_the_base_at_once() -> None:
    got = scaled_frequencies(SIZE, 1e4, {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}, LONGEST, 1)
    base = 1e4 * 1000.0 ** (SIZE / (SIZE - 2))
    expected = torch.tensor([base ** (-2 * i / SIZE) for i in range(SIZE // 2)])
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_ntk_turns_the_first_pair_slower_and_the_last_by_the_factor(factor: float) -> None:
    got = scaled_frequencies(SIZE, 1e4, {"rope_type": "ntk", "factor": factor}).tolist()
    exact = [(factor * 1e4) ** (-2 * i / SIZE) / factor ** (2 / SIZE) for i in range(SIZE // 2)]
    assert got == pytest.approx(exact, rel=2e-6)
    assert got[-1] == pytest.approx(1e4 ** (-2 * (SIZE // 2 - 1) / SIZE) / factor, rel=2e-6)


def test_mixed_ntk_stretches_each_pair_by_a_power_of_its_place() -> None:
    got = scaled_frequencies(SIZE, 1e4, {"rope_type": "ntk", "factor": 8.0, "mixed_b": 0.625}).tolist()
    plain = scaled_frequencies(SIZE, 1e4, None).tolist()
    half = SIZE // 2
    for place, (stretched, before) in enumerate(zip(got, plain, strict=True), start=1):
        power = math.log(8.0) / half**0.625 * place**0.625
        assert stretched == pytest.approx(before / math.exp(power), rel=1e-5)


@pytest.mark.parametrize(("alias", "kind"), [("su", "longrope"), ("deepseek_yarn", "yarn")])
def test_other_names_mean_the_same(alias: str, kind: str) -> None:
    values = KINDS[kind]
    other = {**values, "rope_type": alias}
    assert torch.equal(
        scaled_frequencies(SIZE, 1e4, other, LONGEST, LONGEST), scaled_frequencies(SIZE, 1e4, values, LONGEST, LONGEST)
    )
    assert attention_factor(other, LONGEST) == attention_factor(values, LONGEST) != 1.0


def test_every_kind_of_transformers_is_known() -> None:
    assert set(ROPE_INIT_FUNCTIONS) <= set(SCALINGS)


@pytest.mark.parametrize("kind", ["linear", "ntk", "dynamic", "llama3"])
def test_a_number_that_is_absent_is_named(kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scaled_frequencies(SIZE, 1e4, {"rope_type": kind, "original_max_position_embeddings": 8})
    assert caught.value.message == f"the rotary scaling '{kind}' lacks 'factor'"
    assert caught.value.field == "rope_scaling.factor"


@pytest.mark.parametrize("factors", [None, [1.0, 2.0]])
def test_longrope_needs_a_factor_for_each_pair(factors: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        scaled_frequencies(SIZE, 1e4, {**LONGROPE, "long_factor": factors}, LONGEST, LONGEST)
    assert caught.value.message == "the rotary scaling needs 16 numbers in 'long_factor'"


@pytest.mark.parametrize("size", [8, 12, 20])
def test_neighbouring_pairs_are_halves_after_their_rows_are_reordered(size: int) -> None:
    """Scores of queries and keys whose rows were reordered are those of GPT-J's rotation, whole heads or a part."""
    head, heads, tokens = 20, 3, 7
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn((2, tokens, heads, head), generator=generator)
    angles = Rotary(size, 100.0, None, 64, CPU)(torch.arange(tokens) * 5)
    cos, sin = (part.repeat_interleave(2, -1) for part in angles.chunk(2, -1))
    turned = [x.clone() for x in (q, k)]
    for x in turned:
        part, _ = apply_rotary_pos_emb(x[..., :size], x[..., :size], cos, sin, unsqueeze_dim=1)
        x[..., :size] = part
    expected = torch.einsum("thd,shd->hts", *turned)
    order = RowOrder("interleaved_pairs", heads, 0 if size == head else size)
    mine = [reorder_rows(x.flatten(1), order, dim=1).view_as(x) for x in (q, k)]
    got = torch.einsum("thd,shd->hts", *(rotary(x, angles) for x in mine))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
