"""Tiny random models that the fallback runs: dense ones, experts, and the text of models with images."""

from __future__ import annotations

from typing import Any

from tiny_models import CAPS, SIZES, SLIDING, Recipe, neox, recipe

MARKS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""For configurations that must have some."""
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LATENT: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
DEEPSEEK: dict[str, Any] = {
    **EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
PLAIN_ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
SECTIONS: dict[str, Any] = {"rope_parameters": {**PLAIN_ROPE["rope_parameters"], "mrope_section": [4, 2, 2]}}
SIGHT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
DEEP_SIGHT: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 48,
    "deepstack_visual_indexes": [0],
}


def with_images(name: str, text: dict[str, Any], sight: dict[str, Any], **values: Any) -> Recipe:
    """Return a recipe for a model that also sees."""
    values = {"text_config": {**SIZES, **text}, "vision_config": sight, **values}
    return Recipe(f"{name}Config", f"{name}ForConditionalGeneration", values, without=tuple(SIZES))


RECIPES: dict[str, Recipe] = {
    "llama": recipe("Llama"),
    "llama_tied": recipe("Llama", tie_word_embeddings=True, attention_bias=True),
    "qwen3": recipe("Qwen3", head_dim=16),
    "gemma3": Recipe("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 16, "query_pre_attn_scalar": 20, **SLIDING}),
    "gpt_neox": neox(rotary_pct=0.5),
    "cohere": recipe("Cohere"),
    "apertus": recipe("Apertus", **PLAIN_ROPE),
    "apertus_tied": recipe("Apertus", tie_word_embeddings=True, **PLAIN_ROPE),
    "nanochat": recipe("NanoChat"),
    "jais2": recipe("Jais2"),
    "vaultgemma": recipe("VaultGemma", head_dim=16, query_pre_attn_scalar=20, **SLIDING, **CAPS),
    "cwm": recipe("Cwm", head_dim=12, **SLIDING, **MARKS, **PLAIN_ROPE),
    "ministral": recipe("Ministral", head_dim=12, **SLIDING),
    "hyperclovax": recipe("HyperCLOVAX"),
    "youtu": recipe("Youtu", **LATENT),
    "dots1": recipe("Dots1", **DEEPSEEK, head_dim=12),
    "deepseek_v3": recipe("DeepseekV3", **DEEPSEEK, **LATENT),
    "minimax_m2": recipe("MiniMaxM2", num_local_experts=8, num_experts_per_tok=2, head_dim=12, rotary_dim=8),
    "flex_olmo": recipe("FlexOlmo", num_experts=8, num_experts_per_tok=2),
    "granitemoe": recipe("GraniteMoe", num_local_experts=8, num_experts_per_tok=2),
    "gemma3_images": with_images("Gemma3", {"head_dim": 16, **SLIDING}, SIGHT, mm_tokens_per_image=4),
    "llava": with_images(
        "Llava", {"model_type": "llama"}, {"model_type": "clip_vision_model", **SIGHT}, tie_word_embeddings=False
    ),
    "qwen3_vl": with_images("Qwen3VL", {"head_dim": 16, **SECTIONS}, DEEP_SIGHT),
}
