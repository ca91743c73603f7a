"""Models that transformers quantizes by torchao and saves, through the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine
from hf import assert_equal, make_tiny, random_prompts

from jackfield import SamplingParams

torchao = pytest.importorskip("torchao.quantization", reason="needs torchao, which writes these checkpoints")

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
KINDS: dict[str, Any] = {
    "int8": lambda: torchao.Int8WeightOnlyConfig(version=2),
    "int8, activations too": lambda: torchao.Int8DynamicActivationInt8WeightConfig(version=2),
    "float8": lambda: torchao.Float8WeightOnlyConfig(),
    "int4": lambda: torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(32)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_those_of_what_the_weights_stand_for(engine: Engine, tmp_path: Path, kind: str) -> None:
    from transformers import LlamaForCausalLM, TorchAoConfig

    source = make_tiny(tmp_path / "source", "llama").folder
    packed = LlamaForCausalLM.from_pretrained(source, quantization_config=TorchAoConfig(KINDS[kind]()))
    packed.save_pretrained(tmp_path / "packed")
    assert (
        json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]["quant_method"]
        == "torchao"
    )
    meaning = LlamaForCausalLM.from_pretrained(source).float().eval()
    for name, parameter in packed.named_parameters():
        if hasattr(parameter, "dequantize") and type(parameter.data) is not torch.Tensor:
            meaning.get_parameter(name).data = parameter.dequantize().float()
    prompts = random_prompts((30, 5, 17), seed=2)
    for method in (None, "torchao"):
        options = {} if method is None else {"quantization.force": method}
        llm = engine(tmp_path / "packed", max_model_len=128, dtype="float32", **options)
        outputs = [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)]
        assert_equal(meaning, prompts, outputs)
