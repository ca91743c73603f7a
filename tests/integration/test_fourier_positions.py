"""Models with Fourier position embeddings, from their checkpoint to tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine
from hf import LLAMA3_ROPE, SIZES, Tiny, assert_equal, assert_logprobs, changed_copy, make_tiny, random_prompts
from safetensors.torch import load_file, save_file
from transformers.models.llama import modeling_llama

from jackfield import SamplingParams
from jackfield.errors import CheckpointError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
HEADS, SIZE = SIZES["num_key_value_heads"], 16
KEYS = {"fope_init_factor": 0.5, "fope_sep_head": True, "num_inv_freq": None}
KEPT = {"default": 4, "llama3": 3}
"""Waves that complete a turn within 512 tokens, of 8 with base 10000."""


def with_matrices(tiny: Tiny, folder: Path, scaling: dict[str, Any], kept: int) -> dict[str, torch.Tensor]:
    """Write a copy of a model with coefficients; returns them."""
    changed_copy(tiny.folder, folder, rope_parameters=scaling)
    generator = torch.Generator().manual_seed(5)
    shape = (HEADS, kept, kept) if scaling["fope_sep_head"] else (kept, kept)
    made = {name: torch.randn(shape, generator=generator) * 0.2 + torch.eye(kept) for name in ("cos_coef", "sin_coef")}
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, **{f"model.rotary_emb.{k}": v for k, v in made.items()}}, folder / "model.safetensors")
    return made


@pytest.fixture
def apply_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reference turn each query head by the angles of its cache head: cosines are [B, T, K, D] here."""

    def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        cos, sin = (part if part.dim() == 4 else part.unsqueeze(2) for part in (cos, sin))
        cos, sin = (part.transpose(1, 2).repeat_interleave(x.shape[1] // part.shape[2], 1) for part in (cos, sin))
        low, high = x.double().chunk(2, -1)
        return (x.double() * cos + torch.cat((-high, low), -1) * sin).float()

    def apply(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any) -> Any:
        return turned(q, cos, sin), turned(k, cos, sin)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", apply)


def teach(tiny: Tiny, frequencies: torch.Tensor, matrices: dict[str, torch.Tensor]) -> None:
    """Let the reference compute the definition in float64."""
    kept = matrices["cos_coef"].shape[-1]

    def angles(_: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        waves = position_ids.double()[..., None, None] * frequencies[:kept].double()
        both = []
        for name, wave in (("cos_coef", waves.cos()), ("sin_coef", waves.sin())):
            matrix = matrices[name].double()
            whole = matrix if matrix.dim() == 3 else matrix.expand(HEADS, kept, kept)
            mixed = torch.einsum("btxw,kwv->btkv", wave, whole)
            half = torch.cat((mixed, mixed.new_ones(*mixed.shape[:-1], SIZE // 2 - kept)), -1)
            both.append(torch.cat((half, half), -1))
        return both[0], both[1]

    tiny.model.model.rotary_emb.forward = angles


@pytest.mark.usefixtures("apply_by_head")
@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("kind", ["default", "llama3"])
def test_tokens_equal_the_definition(engine: Engine, tmp_path: Path, kind: str, by_head: bool) -> None:
    base = {"rope_type": "default", "rope_theta": 10000.0} if kind == "default" else LLAMA3_ROPE
    tiny = make_tiny(tmp_path / "model", "llama", rope_parameters=base)
    frequencies = tiny.model.model.rotary_emb.inv_freq.clone()
    folder = tmp_path / "fope"
    matrices = with_matrices(tiny, folder, {**base, **KEYS, "fope_sep_head": by_head}, KEPT[kind])
    prompts = random_prompts((40, 3, 90))
    llm = engine(folder, block_size=8, long_prefill_token_threshold=7)
    outputs = [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)]
    with pytest.raises(AssertionError):
        assert_equal(tiny.model, prompts, outputs)
    teach(tiny, frequencies, matrices)
    assert_equal(tiny.model, prompts, outputs)
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=5, ignore_eos=True)
    assert_logprobs(tiny.model, prompts[2], llm.generate([prompts[2]], params)[0].outputs[0], 5)


def test_coefficients_must_be_there_and_fit(engine: Engine, tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "model", "llama")
    scaling = {"rope_type": "default", "rope_theta": 10000.0, **KEYS}
    without = changed_copy(tiny.folder, tmp_path / "without", rope_parameters=scaling)
    with pytest.raises(CheckpointError, match=r"rotary\.cos_coef"):
        engine(Path(without))
    with_matrices(tiny, tmp_path / "other", scaling, KEPT["default"] + 1)
    with pytest.raises(CheckpointError, match="does not fit"):
        engine(tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="used by nothing"):
        engine(tmp_path / "other")
