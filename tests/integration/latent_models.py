"""Tiny random models with multi-head latent attention."""

from __future__ import annotations

from typing import Any

from tiny_models import LENGTH, Recipe

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
