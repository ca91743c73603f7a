"""Tiny random models with experts, made with HF's own classes."""

from __future__ import annotations

from typing import Any

from tiny_models import SLIDING, WINDOW, YARN, Recipe, Tensors, common, renamed

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 5}
QWEN: dict[str, Any] = {"num_experts_per_tok": 2, "num_experts": 6, "moe_intermediate_size": 24}
GROUPED: dict[str, Any] = {
    "num_experts_per_tok": 3,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
GRANITE: dict[str, Any] = {
    **EXPERTS,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.3,
}
LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 12,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 40,
    "attention_chunk_size": WINDOW,
    "floor_scale": 16,
    "attn_scale": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def recipe(family: str, **values: Any) -> Recipe:
    """Return a recipe for a family whose classes are called after it."""
    return Recipe(f"{family}Config", f"{family}ForCausalLM", values)


def as_deepseek(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Give Qwen's experts the names of DeepSeek's first model, whose expert for every token has no gate."""
    found = renamed(tensors, {"shared_expert.": "shared_experts."})
    found = {name: tensor for name, tensor in found.items() if "shared_expert_gate" not in name}
    keys = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    counts = {"n_routed_experts": config["num_experts"], "n_shared_experts": 2, "first_k_dense_replace": 0}
    return found, common(config, "DeepseekForCausalLM", **{key: config[key] for key in keys}, **counts)


MOE_RECIPES: dict[str, Recipe] = {
    "mixtral": recipe("Mixtral", **EXPERTS),
    "mixtral_window": recipe("Mixtral", **EXPERTS, sliding_window=WINDOW, tie_word_embeddings=True),
    "phimoe": recipe("Phimoe", **EXPERTS, router_jitter_noise=0.2, attention_bias=True, lm_head_bias=True),
    "qwen2_moe": recipe("Qwen2Moe", **QWEN, shared_expert_intermediate_size=40),
    "qwen2_moe_mixed": recipe(
        "Qwen2Moe",
        **{**QWEN, "num_hidden_layers": 4, "num_experts_per_tok": 1},
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        shared_expert_intermediate_size=40,
        norm_topk_prob=True,
    ),
    "qwen3_moe": recipe("Qwen3Moe", **QWEN, head_dim=16, norm_topk_prob=True),
    "qwen3_moe_mixed": recipe("Qwen3Moe", **QWEN, head_dim=12, mlp_only_layers=[0], tie_word_embeddings=True),
    "deepseek": Recipe(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**QWEN, "shared_expert_intermediate_size": 48, "qkv_bias": False, "norm_topk_prob": False},
        saved_as=as_deepseek,
    ),
    "olmoe": recipe("Olmoe", num_experts_per_tok=3, num_experts=7),
    "olmoe_normed": recipe("Olmoe", num_experts_per_tok=2, num_experts=4, norm_topk_prob=True, attention_bias=True),
    "granitemoe": recipe("GraniteMoe", **GRANITE),
    "granitemoeshared": recipe("GraniteMoeShared", **GRANITE, shared_intermediate_size=40),
    "gpt_oss": recipe("GptOss", **EXPERTS, **SLIDING, head_dim=16, rope_parameters=YARN, swiglu_limit=1.5),
    "llama4": Recipe("Llama4TextConfig", "Llama4ForCausalLM", LLAMA4),
    "llama4_mixed": Recipe(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**LLAMA4, "interleave_moe_layer_step": 2, "use_qk_norm": False, "attn_temperature_tuning": False},
    ),
    "glm4_moe": recipe("Glm4Moe", **GROUPED, head_dim=16, use_qk_norm=True, attention_bias=True),
    "glm4_moe_plain": recipe("Glm4Moe", **{**GROUPED, "n_group": 1, "topk_group": 1}, head_dim=12),
    "dots1": recipe("Dots1", **GROUPED, head_dim=16),
    "ernie4_5_moe": recipe("Ernie4_5_Moe", moe_k=2, moe_num_experts=6, moe_intermediate_size=24, use_bias=True),
    "hunyuan_moe": recipe("HunYuanMoEV1", num_experts=4, moe_topk=2, head_dim=16),
}
"""Every architecture with experts, with the variants that its configuration can ask for."""
