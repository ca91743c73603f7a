"""Engines on a tiny model with random weights, on token ids."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from jackfield import LLM, SamplingParams

VOCAB = 96
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "platform": "cpu",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "block_size": 4,
    "num_blocks": 120,
    "seed": 1,
}


def write_model(folder: Path) -> str:
    """Write a model without weights or tokenizer."""
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(folder)


def start(model: str, **changes: Any) -> LLM:
    """Return an engine."""
    return LLM(model, **{**SETTINGS, **changes})


def prompt(seed: int, length: int) -> list[int]:
    """Return a prompt of random ids."""
    return random.Random(seed).choices(range(VOCAB), k=length)


def greedy(max_tokens: int = 8, **changes: Any) -> SamplingParams:
    """Return greedy parameters that end at ``max_tokens``."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **changes)


def ids_of(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Return the output ids of prompts."""
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def drain(llm: LLM) -> None:
    """Run what is left, and fail if anything is still held."""
    while llm._core.has_work():
        llm._advance()
    llm._core.scheduler.check_idle()
