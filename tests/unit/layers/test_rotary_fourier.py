"""Fourier position embeddings against sums that are written out in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from layer_world import build_plan, fill

from jackfield.checkpoint import JsonConfigReader
from jackfield.distributed import SingleCommunicator
from jackfield.errors import CheckpointError, ConfigError
from jackfield.interfaces import RankInfo
from jackfield.layers.attention import Attention
from jackfield.layers.builder import LayerBuilder
from jackfield.layers.functional import rotary
from jackfield.layers.rotary_fourier import FourierRotary, kept_waves
from jackfield.testing.ranks import Meeting, ThreadCommunicator
from jackfield_models.rope import read_rope

SIZE, THETA, LONGEST, HEADS = 16, 100.0, 48, 3
FOPE = {"rope_type": "default", "use_fope": True, "fope_sep_head": True, "num_inv_freq": None}
YARN = {**FOPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def coefficients(waves: int, *, by_head: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (HEADS, waves, waves) if by_head else (waves, waves)
    return {name: torch.randn(shape, generator=generator) + torch.eye(waves) for name in ("cos_coef", "sin_coef")}


def definition(waves: Any, matrix: Any, position: int, function: Any) -> list[float]:
    """Return one row of cosines or sines of half a head, a sum for each feature."""
    row = [
        math.fsum(function(position * float(wave)) * float(matrix[i, j]) for i, wave in enumerate(waves))
        for j in range(len(waves))
    ]
    return row + [1.0] * (SIZE // 2 - len(waves))


def made(scaling: dict[str, Any], longest: int = LONGEST) -> FourierRotary:
    found = LayerBuilder(build_plan(SingleCommunicator())).rotary(
        SIZE, theta=THETA, scaling=scaling, max_position=longest, heads=HEADS
    )
    assert isinstance(found, FourierRotary)
    return found


@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize(("count", "longest"), [(None, LONGEST), (None, 8), (3, LONGEST), (SIZE // 2, LONGEST)])
def test_each_feature_turns_by_a_sum_of_waves(by_head: bool, count: int | None, longest: int) -> None:
    module = made({**FOPE, "fope_sep_head": by_head, "num_inv_freq": count}, longest)
    plain = [THETA ** (-2.0 * i / SIZE) for i in range(SIZE // 2)]
    kept = plain[:count] if count else [wave for wave in plain if wave > 2 * math.pi / longest]
    assert 0 < len(kept) <= SIZE // 2 and (count is not None or len(kept) < SIZE // 2)
    weights = coefficients(len(kept), by_head=by_head)
    fill(module.coefficients, weights)
    positions = torch.tensor([0, 1, 7, 40])
    found = module(positions)
    assert found.shape == ((4, HEADS, SIZE) if by_head else (4, SIZE))
    for row, position in zip(found, positions.tolist(), strict=True):
        for head in range(HEADS if by_head else 1):
            cos, sin = (weights[name][head] if by_head else weights[name] for name in ("cos_coef", "sin_coef"))
            wanted = definition(kept, cos, position, math.cos) + definition(kept, sin, position, math.sin)
            np.testing.assert_allclose((row[head] if by_head else row).numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_a_stretched_embedding_keeps_its_factor() -> None:
    module = made(YARN)
    weights = coefficients(len(module.waves_W), by_head=True)
    fill(module.coefficients, weights)
    factor = 0.1 * math.log(4.0) + 1.0
    torch.testing.assert_close(
        module(torch.tensor([0]))[0, 1, : len(module.waves_W)], weights["cos_coef"][1].sum(0) * factor
    )
    assert float(module(torch.tensor([5]))[0, 0, -1]) == pytest.approx(factor)


def test_identity_matrices_leave_ordinary_rotations() -> None:
    scaling = {**FOPE, "fope_sep_head": False, "num_inv_freq": SIZE // 2}
    module = made(scaling)
    fill(module.coefficients, {name: torch.eye(SIZE // 2) for name in ("cos_coef", "sin_coef")})
    plain = LayerBuilder(build_plan(SingleCommunicator())).rotary(SIZE, theta=THETA, scaling=None, max_position=LONGEST)
    positions = torch.arange(LONGEST)
    torch.testing.assert_close(module(positions), plain(positions))
    torch.testing.assert_close(module(torch.stack((positions, positions * 0, positions * 0))), plain(positions))


def test_query_heads_turn_as_their_cache_head(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, group = 5, 2
    module = made(FOPE)
    fill(module.coefficients, coefficients(len(module.waves_W), by_head=True))
    angles = module(torch.arange(tokens) * 3)
    wide = torch.randn(tokens, 80 * SIZE)  # rows of a larger matrix, as heads are of a fused projection
    qk = wide[:, : (HEADS * group + HEADS) * SIZE].view(tokens, -1, SIZE)
    wanted = qk.double()
    owners = [*(head // group for head in range(HEADS * group)), *range(HEADS)]
    for token in range(tokens):
        for head, owner in enumerate(owners):
            cos, sin = angles[token, owner].double().chunk(2)
            low, high = qk[token, head].double().chunk(2)
            wanted[token, head] = torch.cat((low * cos - high * sin, high * cos + low * sin))
    layer = Attention.__new__(Attention)
    torch.nn.Module.__init__(layer)
    layer.heads, layer._rotate, layer._norm_last = HEADS * group, rotary, False
    layer.q_norm = layer.k_norm = None
    layer._prepare(qk, angles)
    torch.testing.assert_close(qk.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("heads", "size", "rank", "mine"), [(3, 3, 1, [1]), (4, 2, 1, [2, 3]), (2, 4, 3, [1])])
def test_ranks_hold_the_matrices_of_their_heads(heads: int, size: int, rank: int, mine: list[int]) -> None:
    builder = LayerBuilder(build_plan(ThreadCommunicator(Meeting(size), rank, size)))
    module = builder.rotary(SIZE, theta=THETA, scaling=FOPE, max_position=LONGEST, heads=heads)
    assert isinstance(module, FourierRotary) and builder._rank == RankInfo(rank, size)
    count = len(module.waves_W)
    weights = {name: torch.randn(heads, count, count) for name in ("cos_coef", "sin_coef")}
    fill(module.coefficients, weights)
    for name, tensor in weights.items():
        assert torch.equal(module.coefficients.get_parameter(name), tensor[mine])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="no frequency"):
        kept_waves(SIZE, THETA, FOPE, 2)
    strict = LayerBuilder(replace(build_plan(SingleCommunicator()), batch_invariant=True))
    with pytest.raises(ConfigError, match="rounded depends"):
        strict.rotary(SIZE, theta=THETA, scaling=FOPE, max_position=LONGEST, heads=HEADS)
    builder = LayerBuilder(build_plan(SingleCommunicator()))
    with pytest.raises(ConfigError, match="cannot share one Fourier"):
        builder.rotary(SIZE, theta=THETA, scaling=FOPE, max_position=LONGEST)
    first = builder.rotary(SIZE, theta=THETA, scaling=FOPE, max_position=LONGEST, heads=HEADS)
    assert builder.rotary(SIZE, theta=THETA, scaling=FOPE, max_position=LONGEST, heads=HEADS) is first
    with pytest.raises(ConfigError, match="cannot share one Fourier"):
        builder.rotary(SIZE, theta=2 * THETA, scaling=FOPE, max_position=LONGEST, heads=HEADS)


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        ({"fope_sep_head": True, "fope_init_factor": 0.5}, None),
        ({"use_fope": True, "fope_sep_head": True, "num_inv_freq": 5}, 5),
        ({"fope_sep_head": True, "fope_num_inv_freq": 7}, 7),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_words_of_configurations(keys: dict[str, Any], count: int | None, key: str) -> None:
    rope = read_rope(JsonConfigReader({key: {"rope_type": "default", **keys}}, ""), SIZE)
    assert rope.fourier and rope.scaling is not None
    assert rope.scaling["fope_sep_head"] is True and rope.scaling["num_inv_freq"] == count


def test_words_that_say_something_else() -> None:
    def read(**keys: Any) -> Any:
        return read_rope(JsonConfigReader({"rope_scaling": keys}, ""), SIZE)

    assert read(use_fope=False, fope_sep_head=True).scaling is None
    with pytest.raises(ConfigError, match="fope_sep_head is absent"):
        read(use_fope=True)
    with pytest.raises(ConfigError, match="cannot have partial_rotary_factor"):
        read(fope_sep_head=True, partial_rotary_factor=0.5)
    with pytest.raises(ConfigError, match="cannot have mrope_section"):
        read(fope_sep_head=True, mrope_section=[4, 2, 2])
    with pytest.raises(CheckpointError, match="fope_sep_heads"):
        read(fope_sep_heads=True)
