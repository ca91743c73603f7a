"""A tiny model of random weights, and engines on the recording platform."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_attention import Exact, Plain, Preparing, Unable
from recording_platform import RecordingPlatform
from safetensors.torch import save_file

from jackfield import LLM

VOCAB, WIDTH, INNER, HEADS, KV_HEADS, SIZE, LAYERS = 96, 32, 48, 4, 2, 8, 2
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 96,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
    "block_size": 8,
    "num_blocks": 80,
    "attention": "plain",
    # What is recorded are ops of torch: C functions would be called once, while the recording is made.
    "ops": "torch",
    "quantization": "unquantized",
}
DECODE_SIZES = (1, 2, 4)
TOKEN_SIZES = (8, 16, 24, 40)

Start = Callable[..., LLM]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights of unit size, so that every part of the model decides about the tokens."""
    generator = torch.Generator().manual_seed(5)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.2) + (len(shape) == 1)

    weights = {"model.embed_tokens.weight": numbers(VOCAB, WIDTH), "lm_head.weight": numbers(VOCAB, WIDTH)}
    weights["model.norm.weight"] = numbers(WIDTH)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, size in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{at}.self_attn.{name}_proj.weight"] = numbers(size * SIZE, WIDTH)
        weights[f"{at}.self_attn.o_proj.weight"] = numbers(WIDTH, HEADS * SIZE)
        weights |= {f"{at}.self_attn.{name}_norm.weight": numbers(SIZE) for name in "qk"}
        weights |= {f"{at}.mlp.{name}_proj.weight": numbers(INNER, WIDTH) for name in ("gate", "up")}
        weights[f"{at}.mlp.down_proj.weight"] = numbers(WIDTH, INNER)
        weights |= {f"{at}.{name}_layernorm.weight": numbers(WIDTH) for name in ("input", "post_attention")}
    folder: Path = tmp_path_factory.mktemp("recorded")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, str(folder / "model.safetensors"))
    return str(folder)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Record few and small sizes; torch's own threads would cost more than they give."""
    monkeypatch.setattr("jackfield.worker.graphs.SIZES", DECODE_SIZES)
    monkeypatch.setattr("jackfield.worker.piecewise.SIZES", TOKEN_SIZES)
    monkeypatch.setattr("jackfield.config.load.process_environment", dict)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def start(model: str) -> Iterator[Start]:
    """Start engines; after the test each must hold nothing."""
    started: list[LLM] = []

    def make(platform: str = "recording", *more: Any, **changes: Any) -> LLM:
        plugins = [RecordingPlatform, Plain, Preparing, Exact, Unable, *more]
        llm = LLM(model, plugins=plugins, platform=platform, **{**SETTINGS, **changes})
        started.append(llm)
        return llm

    yield make
    for llm in started:
        while llm._core.has_work():
            llm._advance()
        llm._core.scheduler.check_idle()
        llm.shutdown()
