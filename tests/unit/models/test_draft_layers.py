"""Layers that only draft, of published configurations: which tensors of the checkpoint they take."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield.checkpoint import JsonConfigReader
from jackfield.errors import CheckpointError
from jackfield.interfaces import ModelArchitecture
from jackfield.interfaces.weights import unique_targets
from jackfield.registry import Registry
from jackfield_models.mtp import DeepseekV3Next, Glm4MoeNext, NextConfig, NextLayer, Qwen3NextNext

DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
    "use_qk_norm": True,
    "vocab_size": 151552,
}
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
}
PUBLISHED: dict[type[NextLayer], tuple[dict[str, Any], set[str]]] = {
    DeepseekV3Next: (
        DEEPSEEK,
        {
            *(f"model.layers.61.{part}" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
            *(f"model.layers.61.self_attn.{part}_proj" for part in ("q_a", "q_b", "kv_b", "o")),
            "model.layers.61.input_layernorm",
            "model.layers.61.mlp.gate.e_score_correction_bias",
            "model.layers.61.mlp.experts.255.down_proj",
            "model.layers.61.mlp.shared_experts.up_proj",
        },
    ),
    Glm4MoeNext: (
        GLM,
        {
            *(f"model.layers.92.{part}" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
            *(f"model.layers.92.self_attn.{part}" for part in ("q_proj", "q_norm", "k_norm", "o_proj")),
            "model.layers.92.mlp.experts.159.gate_proj",
        },
    ),
    Qwen3NextNext: (
        QWEN,
        {
            *(f"mtp.{part}" for part in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")),
            *(f"mtp.layers.0.self_attn.{part}" for part in ("q_proj", "v_proj", "q_norm", "o_proj")),
            "mtp.layers.0.post_attention_layernorm",
            "mtp.layers.0.mlp.experts.511.up_proj",
            "mtp.layers.0.mlp.shared_expert_gate",
        },
    ),
}
CASES = pytest.mark.parametrize("plugin", PUBLISHED, ids=lambda plugin: plugin.name)


def read(plugin: type[NextLayer], **changes: Any) -> NextConfig:
    reader = JsonConfigReader({**PUBLISHED[plugin][0], **changes})
    config = plugin.config(reader)
    reader.finish()
    return config


@CASES
def test_the_layers_tensors_are_taken_and_no_others(plugin: type[NextLayer]) -> None:
    rules = plugin.weight_map(read(plugin), "safetensors").rules
    sources = {rule.source for rule in rules}
    assert sources >= PUBLISHED[plugin][1]
    first = "mtp." if plugin is Qwen3NextNext else f"model.layers.{PUBLISHED[plugin][0]['num_hidden_layers']}."
    assert {source for source in sources if not source.startswith(first)} == set()
    assert set(unique_targets(rules)) <= {"layers.0.experts.gate_up[gate]", "layers.0.experts.gate_up[up]"}


@CASES
def test_it_is_one_layer_with_attention_and_experts(plugin: type[NextLayer]) -> None:
    config = read(plugin)
    (group,) = plugin.attention_groups(config)
    assert group.layers == (0,)
    assert group.kind == ("mla" if plugin is DeepseekV3Next else "full")
    assert plugin.experts(config) is not None
    assert config.behind == PUBLISHED[plugin][0]["num_hidden_layers"]


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_layers_is_refused(key: str, count: int) -> None:
    with pytest.raises(CheckpointError, match=f"has {count} layers that only draft") as caught:
        read(Qwen3NextNext, **{key: count})
    assert caught.value.value == count


def test_embeddings_of_its_own_are_refused() -> None:
    with pytest.raises(CheckpointError, match="mtp_use_dedicated_embeddings"):
        read(Qwen3NextNext, mtp_use_dedicated_embeddings=True)


def test_who_has_such_layers_names_a_plugin_that_is_there() -> None:
    plugins = {ref.name: ref.load() for ref in Registry.discover().refs("models") if ref.distribution == "jackfield"}
    named = {plugin.draft_layers for plugin in plugins.values() if isinstance(plugin, type)}  # type: ignore[attr-defined]
    builders = {name: plugins[name] for name in named - {""}}
    assert len(builders) == 6
    for plugin in builders.values():
        assert plugin is not None and issubclass(plugin, ModelArchitecture) and plugin.tasks == {"draft"}
