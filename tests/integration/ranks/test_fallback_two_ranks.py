"""The fallback on two ranks gives what it gives on one, which is what transformers gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from decoders_two_ranks import Results
from fallback_two_ranks import MODELS, UNCUT, alone, run_rank
from torch.multiprocessing.spawn import spawn
from two_ranks import free_port, save_drawn

SIZES: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
NO_KV = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
DOTS: dict[str, Any] = {**SIZES, **EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8}
SAVED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**SIZES, "attention_bias": True}),
    "one_cache_head": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gpt_neox": ("GPTNeoXForCausalLM", NO_KV),
    "jais2": ("Jais2ForCausalLM", {**SIZES, "vocab_size": 31}),
    "dots1": ("Dots1ForCausalLM", DOTS),
    "apertus": ("ApertusForCausalLM", {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "phi3": ("Phi3ForCausalLM", SIZES),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """The folder of all models, and transformers' logits."""
    folder, expected = tmp_path_factory.mktemp("fallback"), {}
    for name, (architecture, values) in SAVED.items():
        torch.manual_seed(5)
        made = getattr(transformers, architecture)
        expected[name] = save_drawn(made(made.config_class(**values)), folder / name)
    return folder, expected


@pytest.fixture(scope="module")
def two(saved: tuple[Path, Results]) -> list[Results]:
    folder = saved[0]
    spawn(run_rank, args=(2, free_port(), str(folder)), nprocs=2)  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def test_one_rank_gives_what_transformers_gives(saved: tuple[Path, Results]) -> None:
    folder, expected = saved
    assert {*MODELS, UNCUT} == set(SAVED)
    for name, got in alone(folder).items():
        torch.testing.assert_close(got, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_give_what_transformers_gives(name: str, saved: tuple[Path, Results], two: list[Results]) -> None:
    expected = saved[1][name]
    assert expected.abs().max() > 0.1, "the result is not trivial"
    for rank in two:
        torch.testing.assert_close(rank[name], expected, rtol=1e-4, atol=1e-4)


def test_attention_that_cannot_be_cut_is_refused(saved: tuple[Path, Results], two: list[Results]) -> None:
    for rank in range(2):
        assert (saved[0] / f"refused{rank}.txt").read_text() == (
            "transformers has no plan that cuts model.layers.0.self_attn by heads\n"
            "  field: parallel.tensor_parallel_size = 2\n"
            "  remedy: leave it at 1, or install a plugin for the architecture"
        )
