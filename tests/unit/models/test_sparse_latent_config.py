"""DeepSeek-V3.2's configuration as it was published."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield.checkpoint import JsonConfigReader
from jackfield.errors import CheckpointError
from jackfield.interfaces.weights import unique_targets
from jackfield_models.decoder import DecoderConfig
from jackfield_models.deepseek import DeepseekV32

PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v32",
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
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def read(**changes: Any) -> DecoderConfig:
    reader = JsonConfigReader({**PUBLISHED, **changes})
    config = DeepseekV32.config(reader)
    reader.finish()
    return config


def test_one_group_of_layers_has_the_indexers_sizes() -> None:
    (group,) = DeepseekV32.attention_groups(read())
    assert (group.kind, group.layers) == ("mla_sparse", tuple(range(61)))
    assert (group.num_heads, group.head_size, group.value_head_size) == (128, 192, 128)
    index = {"index_heads": 64, "index_size": 128, "index_topk": 2048}
    assert dict(group.extra) == {"latent_size": 512, "rope_size": 64, **index}


def test_weights_of_the_indexer_have_a_place() -> None:
    rules = DeepseekV32.weight_map(read(), "safetensors").rules
    assert unique_targets(rules) == []
    own = {rule.source.removeprefix("model.layers.7.self_attn.indexer."): rule.target for rule in rules}
    wanted = {"wq_b": "q", "wk": "k", "k_norm": "k_norm", "weights_proj": "weight"}
    assert {name: own[name] for name in wanted} == {name: f"layers.7.mixer.index_{to}" for name, to in wanted.items()}


@pytest.mark.parametrize(
    "change", [{"layer_types": ["full_attention"] * 61}, {"mlp_layer_types": ["sparse"] * 61}, {"q_lora_rank": None}]
)
def test_what_it_does_not_do_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(change))):
        read(**change)
