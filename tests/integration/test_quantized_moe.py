"""Whole models with experts in checkpoint formats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import Engine
from moe_models import MOE_RECIPES
from quantized_models import quantized, same, save
from quantized_writers import FORMATS, four_bit_floats, pairs
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}


def source(name: str, folder: Path) -> Path:
    """Save a tiny model whose sizes suit every format."""
    recipe = MOE_RECIPES[name]
    values = {**recipe.values, **{key: size for key, size in SIZES.items() if key in recipe.values or "moe" not in key}}
    return replace(recipe, values=values).make(folder).folder


def microscaled(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks [X, O, I / 32, 16] and exponents [X, O, I / 32] of experts."""
    groups = weight.unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    codes = four_bit_floats(groups / 2.0 ** exponent.unsqueeze(-1))
    return pairs(codes), (exponent + 127).to(torch.uint8)


def test_gpt_oss_in_its_own_layout(engine: Engine, tmp_path: Path) -> None:
    """The plain model is made of what transformers reads in the blocks."""
    folder = source("gpt_oss", tmp_path / "source")
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    packed, plain = dict(tensors), dict(tensors)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = microscaled(tensors[name].transpose(1, 2))
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert plain[name].shape == tensors[name].shape
    skip = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    own = {"quant_method": "mxfp4", "modules_to_not_convert": skip}
    left = save(tmp_path / "packed", packed, {**config, "quantization_config": own})
    same(engine(left, max_model_len=128), engine(save(tmp_path / "plain", plain, config), max_model_len=128))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("mixtral", "fp8-block"),
        ("mixtral", "gptq-4-order"),
        ("qwen3_moe", "fp8-tensor"),
        ("qwen3_moe", "ct-w4-asymmetric"),
        pytest.param("mixtral", "awq", marks=SLOW),
        pytest.param("mixtral", "modelopt-nvfp4", marks=SLOW),
        pytest.param("qwen3_moe", "fp8-block", marks=SLOW),
        pytest.param("qwen3_moe", "gptq-3", marks=SLOW),
    ],
)
def test_experts_one_by_one(engine: Engine, tmp_path: Path, model: str, name: str) -> None:
    folder = source(model, tmp_path / "source")
    kind = FORMATS[name]
    left, right = quantized(folder, tmp_path, kind.write, kind.config, lambda n: "_proj" in n or ".experts." in n)
    same(engine(left, max_model_len=128), engine(right, max_model_len=128))
