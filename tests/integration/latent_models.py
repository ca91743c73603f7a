"""Tiny random models with multi-head latent attention, and what holds for all of them."""

from __future__ import annotations

from typing import Any

from engines import Engine
from hf import Tiny, assert_equal, random_prompts
from tiny_models import LENGTH, Recipe

from jackfield import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)

LATENT: dict[str, Any] = {
    "num_key_value_heads": None,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
}
DENSE: dict[str, Any] = {**LATENT, "first_k_dense_replace": 3, "num_experts_per_tok": 2}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}

EXPERTS: dict[str, Any] = {
    **LATENT,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}

RECIPES: dict[str, Recipe] = {
    "v2-dense": Recipe("DeepseekV2Config", "DeepseekV2ForCausalLM", {**DENSE, "rope_parameters": YARN}),
    "v2-lite-dense": Recipe("DeepseekV2Config", "DeepseekV2ForCausalLM", {**DENSE, "q_lora_rank": None}),
    "v3-dense": Recipe(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**DENSE, "attention_bias": True, "max_position_embeddings": LENGTH},
    ),
    "v3-halves": Recipe("DeepseekV3Config", "DeepseekV3ForCausalLM", {**DENSE, "rope_interleave": False}),
    "v2": Recipe("DeepseekV2Config", "DeepseekV2ForCausalLM", {**EXPERTS, "topk_method": "group_limited_greedy"}),
    "v2-lite": Recipe("DeepseekV2Config", "DeepseekV2ForCausalLM", {**EXPERTS, "q_lora_rank": None}),
    "v3": Recipe("DeepseekV3Config", "DeepseekV3ForCausalLM", {**EXPERTS, "rope_parameters": YARN}),
}
INDEX: dict[str, Any] = {"num_key_value_heads": 4, "index_n_heads": 24, "index_head_dim": 12, "index_topk": 12}
"""Index heads are many, so that no two tokens score alike (with few, all of them may be 0)."""
SPARSE: dict[str, Recipe] = {
    "dense": Recipe("DeepseekV32Config", "DeepseekV32ForCausalLM", {**DENSE, **INDEX}),
    "experts": Recipe(
        "DeepseekV32Config", "DeepseekV32ForCausalLM", {**EXPERTS, **INDEX, "index_topk": 31, "rope_parameters": YARN}
    ),
    "all chosen": Recipe("DeepseekV32Config", "DeepseekV32ForCausalLM", {**DENSE, **INDEX, "index_topk": 2048}),
}
"""Models whose attention is to tokens that an indexer chooses."""


def cut_any_way(engine: Engine, tiny: Tiny, chunk: int, parts: dict[str, dict[str, int]]) -> None:
    """Assert that chunks, hits of prefixes and preemption change no token; ``parts`` are options of plugins."""
    llm = engine(
        tiny.folder, long_prefill_token_threshold=chunk, block_size=16, max_num_seqs=4, **{"plugins.options": parts}
    )
    prompts = random_prompts((50, 90))
    first = [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)]
    assert_equal(tiny.model, prompts, first)
    longer = [[*prompt, *output, 5] for prompt, output in zip(prompts, first, strict=True)]
    again = llm.generate(longer, GREEDY)
    assert all((request.num_cached_tokens or 0) >= 48 for request in again)
    assert_equal(tiny.model, longer, [request.outputs[0].token_ids for request in again])
    small = engine(tiny.folder, block_size=16, num_blocks=12, max_model_len=128, long_prefill_token_threshold=chunk)
    many = random_prompts((40, 60, 30, 70, 20), seed=9)
    outputs = [request.outputs[0].token_ids for request in small.generate(many, GREEDY)]
    assert_equal(tiny.model, many, outputs)
    assert small._core.scheduler.counters.preemptions > 0
