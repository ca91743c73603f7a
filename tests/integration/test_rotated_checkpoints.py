"""Models whose activations the compressed-tensors library rotates as they run, from their checkpoints."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.transform import TransformArgs, TransformConfig, TransformScheme, apply_transform_config
from engines import Engine
from hf import Tiny, assert_equal, make_tiny, random_prompts
from quantized_models import save
from quantized_writers import compressed, groups_of
from test_models_hf import check_logprobs

from jackfield import SamplingParams

W8 = {"num_bits": 8, "type": "int", "strategy": "group", "symmetric": True, "group_size": 32}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
DOWN = ["re:.*down_proj$"]
LINEAR: dict[str, Any] = {"targets": ["Linear"], "ignore": ["re:.*lm_head"]}
KINDS: dict[str, dict[str, TransformScheme]] = {
    "spinquant": {
        "R4": TransformScheme(
            type="hadamard",
            precision=torch.float32,
            apply=[
                TransformArgs(targets=DOWN, location="input"),
                TransformArgs(targets=DOWN, location="weight_input", inverse=True),
            ],
        )
    },
    "quip": {
        "v": TransformScheme(
            type="random-hadamard",
            precision=torch.float32,
            apply=[
                TransformArgs(location="input", **LINEAR),
                TransformArgs(location="weight_input", inverse=True, **LINEAR),
            ],
        ),
        "u": TransformScheme(
            type="random-hadamard",
            precision=torch.float32,
            apply=[
                TransformArgs(location="weight_output", **LINEAR),
                TransformArgs(location="output", inverse=True, **LINEAR),
            ],
        ),
    },
}


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_rotated_model(engine: Engine, tmp_path: Path, kind: str, once: bool) -> None:
    tiny = make_tiny(tmp_path / "source", "llama", intermediate_size=128, num_hidden_layers=2)
    transforms = TransformConfig(config_groups=KINDS[kind])
    model = copy.deepcopy(tiny.model)
    apply_transform_config(model, transforms)
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[str, int]] = set()
    for name, tensor in model.state_dict().items():
        module = name.rpartition(".")[0]
        if module.endswith("_proj"):
            found, meaning = compressed(W8, "pack-quantized")(tensor)
            tensors |= {f"{module}.{key}": value for key, value in found.items()}
            model.get_submodule(module).weight.data = meaning
        elif not (once and module.endswith("put") and (module.rpartition(".")[2], len(tensor)) in seen):
            seen.add((module.rpartition(".")[2], len(tensor)))
            tensors[name] = tensor
    assert any(name.endswith("_input.weight") for name in tensors)
    values = json.loads((tiny.folder / "config.json").read_text())
    values["quantization_config"] = groups_of(W8, "pack-quantized", transform_config=transforms.model_dump(mode="json"))
    folder = save(tmp_path / "packed", tensors, values)
    llm, reference = engine(folder, block_size=8), Tiny(folder, model.eval())
    check_logprobs(llm, reference, random_prompts((30,), seed=3)[0])
    prompts = random_prompts((3, 17))
    assert_equal(reference.model, prompts, [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)])
