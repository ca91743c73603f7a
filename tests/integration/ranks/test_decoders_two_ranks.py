"""Decoders of every family on two ranks give what they give on one, which is what transformers gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from decoders_two_ranks import ARCHITECTURES, Results, alone, run_rank
from torch.multiprocessing.spawn import spawn
from two_ranks import free_port, save_drawn

SIZES = {
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
TIED = {"tie_word_embeddings": True}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 30, "initializer_range": 0.2}
NO_KV = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
NO_INNER = {key: value for key, value in NO_KV.items() if key != "intermediate_size"}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "phi3": ("Phi3Config", "Phi3ForCausalLM", SIZES),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**SIZES, "head_dim": 8, "sliding_window": 5}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {**SIZES, "num_key_value_heads": 1}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {**SIZES, "use_qk_norm": True, "vocab_size": 31}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {**SIZES, "qk_layernorm": True, "use_qkv_bias": True}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {**SIZES, "head_dim": 8}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", NO_KV),
    "gpt_bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", GPT),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 32, "n_head": 4, "vocab_size": 30, **TIED}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {**NO_INNER, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "opt": ("OPTConfig", "OPTForCausalLM", {**NO_INNER, "ffn_dim": 24, "word_embed_proj_dim": 16, "init_std": 0.2}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """The folder of all models, and transformers' logits."""
    folder, expected = tmp_path_factory.mktemp("decoders"), {}
    for name, (config, model, values) in MODELS.items():
        torch.manual_seed(5)
        no_marks = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        made = getattr(transformers, model)(getattr(transformers, config)(**values, **no_marks))
        expected[name] = save_drawn(made, folder / name)
    return folder, expected


@pytest.fixture(scope="module")
def two(saved: tuple[Path, Results]) -> list[Results]:
    folder = saved[0]
    spawn(run_rank, args=(2, free_port(), str(folder)), nprocs=2)  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def test_one_rank_gives_what_transformers_gives(saved: tuple[Path, Results]) -> None:
    folder, expected = saved
    assert set(ARCHITECTURES) == set(MODELS)
    for name, got in alone(folder).items():
        torch.testing.assert_close(got, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_give_what_transformers_gives(name: str, saved: tuple[Path, Results], two: list[Results]) -> None:
    expected = saved[1][name]
    assert expected.abs().max() > 0.1, "the result is not trivial"
    for rank in two:
        torch.testing.assert_close(rank[name], expected, rtol=1e-4, atol=1e-4)
