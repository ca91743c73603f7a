"""Tiny random models whose layers keep states."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import Recipe, Tensors

PLAIN = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
NO_TOKENS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
MAMBA: dict[str, Any] = {"state_size": 8, "time_step_rank": 6, "expand": 2, "num_hidden_layers": 3, **NO_TOKENS}
MAMBA2: dict[str, Any] = {
    "state_size": 16,
    "num_heads": 6,
    "head_dim": 16,
    "n_groups": 2,
    "expand": 2,
    "chunk_size": 8,
    "num_hidden_layers": 3,
    **NO_TOKENS,
}

DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    # The norm behind the delta rule magnifies what rounding leaves of small outputs; this bounds by how much.
    "rms_norm_eps": 1e-2,
    "initializer_range": 0.1,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
}

OLMO: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rms_norm_eps": 1e-2,
    "initializer_range": 0.1,
    "num_hidden_layers": 4,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
BAMBA: dict[str, Any] = {"mamba_n_heads": 6, "mamba_d_state": 16, "mamba_n_groups": 2, "num_hidden_layers": 4}
STATES_FIRST = ["linear_attention", "full_attention"] * 2
GRANITE: dict[str, Any] = {
    **BAMBA,
    "layer_types": STATES_FIRST,
    "shared_intermediate_size": 40,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.3,
}
NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "ssm_state_size": 16,
    "n_groups": 2,
    "head_dim": 16,
    # transformers bounds step sizes by this, and not by time_step_limit as the published implementation does.
    "time_step_min": 1e-12,
}
FALCON: dict[str, Any] = {**BAMBA, "mamba_d_ssm": 60, "num_hidden_layers": 3}
FACTORS: dict[str, Any] = {
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "mlp_multipliers": [0.7, 1.4],
    "key_multiplier": 0.6,
    "attention_out_multiplier": 0.9,
    "attention_in_multiplier": 1.2,
    "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7],
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.8,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "layer_types": STATES_FIRST,
    "num_hidden_layers": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "moe_intermediate_size": 24,
    "rms_norm_eps": 1e-2,
    "initializer_range": 0.1,
}
ZAMBA: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
    "num_hidden_layers": 5,
    "n_mamba_heads": 6,
    "mamba_d_state": 16,
    "mamba_ngroups": 2,
    "adapter_rank": 6,
    "time_step_min": 0.01,
    "rms_norm_eps": 1e-2,
    "initializer_range": 0.1,
}
SHORT: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "norm_eps": 1e-5}


def hybrid(family: str, config: str = "", without: tuple[str, ...] = (), **values: Any) -> Recipe:
    """Return a recipe for classes that are called after their family."""
    return Recipe(config or f"{family}Config", f"{family}ForCausalLM", values, without=without)


def whole_convolutions(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Cut the convolution of queries, keys and values where they meet: transformers writes three equal parts."""
    found = dict(tensors)
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    for path in [name.removesuffix(".q_conv1d.weight") for name in tensors if name.endswith(".q_conv1d.weight")]:
        names = [f"{path}.{part}_conv1d.weight" for part in "qkv"]
        found |= zip(names, torch.cat([tensors[name] for name in names]).split([key, key, value]), strict=True)
    return found, config


RECIPES: dict[str, Recipe] = {
    "jamba": hybrid(
        "Jamba",
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=4,
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=6,
        mamba_proj_bias=True,
    ),
    "bamba": hybrid("Bamba", **BAMBA, attn_layer_indices=[1, 2], attention_bias=True, mlp_bias=True),
    "granite-hybrid": hybrid("GraniteMoeHybrid", **GRANITE, num_local_experts=5, num_experts_per_tok=2),
    "granite-hybrid-dense": hybrid(
        "GraniteMoeHybrid", **GRANITE, num_local_experts=0, position_embedding_type="rope", tie_word_embeddings=True
    ),
    "nemotron-h": hybrid("NemotronH", **NEMOTRON),
    "nemotron-h-moe": hybrid(
        "NemotronH",
        **{**NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=20,
        routed_scaling_factor=1.5,
    ),
    "nemotron-h-latent": hybrid(
        "NemotronH",
        **{**NEMOTRON, "layers_block_type": ["moe", "linear_attention", "full_attention", "mlp"]},
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=20,
        moe_latent_size=32,
        n_group=2,
    ),
    "falcon-h1": hybrid("FalconH1", **FALCON),
    "falcon-h1-factors": hybrid(
        "FalconH1", **FALCON, **FACTORS, mamba_rms_norm=True, projectors_bias=True, attention_bias=True
    ),
    "falcon-h1-gate-first": hybrid("FalconH1", **FALCON, mamba_rms_norm=True, mamba_norm_before_gate=False),
    "minimax": hybrid(
        "MiniMax",
        num_hidden_layers=4,
        num_local_experts=5,
        num_experts_per_tok=2,
        rms_norm_eps=1e-2,
        full_attn_alpha_factor=1.5,
        full_attn_beta_factor=0.8,
        linear_attn_alpha_factor=1.2,
        linear_attn_beta_factor=0.9,
        mlp_alpha_factor=1.1,
        mlp_beta_factor=0.7,
        block_size=16,
    ),
    "kimi-linear": hybrid("KimiLinear", **LATENT, linear_num_heads=3, linear_head_dim=8),
    "bailing-hybrid": hybrid("BailingHybrid", **LATENT, head_dim=12, n_group=4, topk_group=2),
    "bailing-hybrid-unbounded": hybrid(
        "BailingHybrid", **LATENT, head_dim=12, n_group=1, topk_group=1, kda_safe_gate=False, q_lora_rank=20
    ),
    "qwen3.5": hybrid("Qwen3_5", "Qwen3_5TextConfig", **DELTA),
    "qwen3.5-moe": hybrid(
        "Qwen3_5Moe",
        "Qwen3_5MoeTextConfig",
        ("intermediate_size",),
        **DELTA,
        **EXPERTS,
        shared_expert_intermediate_size=20,
    ),
    "olmo-hybrid": Recipe("OlmoHybridConfig", "OlmoHybridForCausalLM", OLMO, saved_as=whole_convolutions),
    "olmo-hybrid-still": Recipe(
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {**OLMO, "linear_allow_neg_eigval": False, "attention_bias": True},
        saved_as=whole_convolutions,
    ),
    "zamba2": hybrid("Zamba2", **ZAMBA, num_key_value_heads=None, use_shared_attention_adapter=True, use_mem_rope=True),
    "zamba2-blocks": hybrid("Zamba2", **ZAMBA, num_mem_blocks=2, add_bias_linear=True),
    "lfm2": hybrid("Lfm2", **SHORT, block_multiple_of=16),
    "lfm2-biases": hybrid("Lfm2", **SHORT, block_auto_adjust_ff_dim=False, conv_bias=True, tie_word_embeddings=False),
    "lfm2-moe": hybrid("Lfm2Moe", **SHORT, **EXPERTS, num_dense_layers=1, routed_scaling_factor=1.5),
    "mamba": Recipe("MambaConfig", "MambaForCausalLM", MAMBA, without=PLAIN),
    "mamba-biases": Recipe(
        "MambaConfig",
        "MambaForCausalLM",
        {**MAMBA, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "tie_word_embeddings": False},
        without=PLAIN,
    ),
    "falcon-mamba": Recipe("FalconMambaConfig", "FalconMambaForCausalLM", MAMBA, without=PLAIN),
    "mamba2": Recipe("Mamba2Config", "Mamba2ForCausalLM", MAMBA2, without=PLAIN),
    "mamba2-limits": Recipe(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {**MAMBA2, "use_bias": True, "time_step_limit": (0.3, 0.9), "tie_word_embeddings": True},
        without=PLAIN,
    ),
    "qwen3-next-dense": Recipe("Qwen3NextConfig", "Qwen3NextForCausalLM", {**DELTA, "mlp_only_layers": [0, 1, 2, 3]}),
    "qwen3-next": Recipe(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **DELTA,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [1],
        },
    ),
}
