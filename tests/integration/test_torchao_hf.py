"""Models that transformers quantizes by torchao and saves, through the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine
from hf import assert_equal, assert_logprobs, make_tiny, random_prompts
from torchao import quantization as torchao
from torchao.prototype import mx_formats

from jackfield import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=4)
KINDS: dict[str, Any] = {
    "int8": lambda: torchao.Int8WeightOnlyConfig(version=2),
    "int8, activations too": lambda: torchao.Int8DynamicActivationInt8WeightConfig(version=2),
    "int8 in groups": lambda: torchao.Int8WeightOnlyConfig(version=2, granularity=torchao.PerGroup(32)),
    "float8": lambda: torchao.Float8WeightOnlyConfig(),
    "int4": lambda: whole(4),
    "int4, activations too": lambda: torchao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=torchao.PerGroup(32)
    ),
    "mxfp8": lambda: microscaled(torch.float8_e4m3fn),
    "mxfp4": lambda: microscaled(torch.float4_e2m1fn_x2),
    "nvfp4": lambda: mx_formats.NVFP4WeightOnlyConfig(),
    "by module": lambda: torchao.FqnToConfig(
        {
            "re:.*q_proj": torchao.Int8WeightOnlyConfig(version=2),
            "re:.*[kv]_proj": torchao.Float8WeightOnlyConfig(),
            "model.layers.1.mlp.up_proj": mx_formats.NVFP4WeightOnlyConfig(),
            "re:.*down_proj": whole(3),
            "model.embed_tokens": whole(8),
            "lm_head": whole(4),
        }
    ),
}


def whole(bits: int) -> Any:
    kind = getattr(torch, f"int{bits}")
    return torchao.IntxWeightOnlyConfig(weight_dtype=kind, granularity=torchao.PerGroup(32))


def microscaled(kind: torch.dtype) -> Any:
    return mx_formats.MXDynamicActivationMXWeightConfig(activation_dtype=kind, weight_dtype=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_those_of_what_the_weights_stand_for(engine: Engine, tmp_path: Path, kind: str) -> None:
    from transformers import LlamaForCausalLM, TorchAoConfig

    source = make_tiny(tmp_path / "source", "llama").folder
    # Of microscaled floats torchao makes nothing else than bfloat16's; their meaning it says in float32 all the same.
    narrow = kind.startswith("mx")
    dtype, wide = (torch.bfloat16, (torch.float32,)) if narrow else (torch.float32, ())
    settings = TorchAoConfig(KINDS[kind]())
    packed = LlamaForCausalLM.from_pretrained(source, quantization_config=settings, dtype=dtype)
    packed.save_pretrained(tmp_path / "packed")
    assert (
        json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]["quant_method"]
        == "torchao"
    )
    meaning = LlamaForCausalLM.from_pretrained(source).float().eval()
    for name, parameter in packed.named_parameters():
        plain = type(parameter.data) is torch.Tensor
        found = parameter.data if plain else parameter.dequantize(*wide)
        meaning.get_parameter(name).data = found.float()
    prompts = random_prompts((30, 5, 17), seed=2)
    for method in (None, "torchao"):
        options = {} if method is None else {"quantization.force": method}
        llm = engine(tmp_path / "packed", max_model_len=128, dtype="float32", **options)
        outputs = [request.outputs[0] for request in llm.generate(prompts, GREEDY)]
        assert_equal(meaning, prompts, [output.token_ids for output in outputs])
        for prompt, output in zip(prompts, outputs, strict=True):
            assert_logprobs(meaning, prompt, output, 4)
