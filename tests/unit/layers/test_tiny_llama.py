"""A whole tiny model on one rank against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_world import TINY, Llama, Qwen3, TinyModel, llama_config, random_weights
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from jackfield.distributed import SingleCommunicator

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9], [7], [2, 7, 1, 8, 2]]


@pytest.mark.parametrize(
    ("architecture", "config_class", "values"),
    [
        (Llama, LlamaConfig, {}),
        (Llama, LlamaConfig, {"num_key_value_heads": 4, "attention_bias": True}),
        (Llama, LlamaConfig, {"tie_word_embeddings": True}),
        (Qwen3, Qwen3Config, {}),
    ],
    ids=["gqa", "mha with biases", "tied", "normed heads"],
)
def test_logits_are_those_of_transformers(architecture: Any, config_class: Any, values: dict[str, Any]) -> None:
    values = {"tie_word_embeddings": False, **values}
    config = llama_config(architecture, **values)
    tensors = random_weights(config, architecture)
    model = TinyModel(config, tensors, SingleCommunicator(), architecture)
    reference = AutoModelForCausalLM.from_config(config_class(**{**TINY, **values}))
    missing = reference.load_state_dict(tensors, strict=False)
    assert missing.unexpected_keys == []
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    reference.tie_weights()
    got = model.run(PROMPTS)
    start = 0
    for prompt in PROMPTS:
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(got[start : start + len(prompt)], expected, rtol=1e-4, atol=1e-4)
        start += len(prompt)
