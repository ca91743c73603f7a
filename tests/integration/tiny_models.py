"""Tiny random models of every architecture, made with HF's own classes, or with those of a model that computes the
same where transformers has no class for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from hf import Tiny, randomize
from safetensors.torch import load_file, save_file

WINDOW = 24
LENGTH = 256
SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
OLD_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """How a tiny model is made.

    Args:
        config, model: names of HF's classes. values: of the configuration, over SIZES. names: keys that the class calls
            otherwise. without: keys of SIZES that it does not have. saved_as: rewrites the tensors and the
            configuration on disk into another architecture's.
    """

    config: str
    model: str
    values: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    saved_as: Callable[[Tensors, dict[str, Any]], tuple[Tensors, dict[str, Any]]] | None = None

    def make(self, folder: Path) -> Tiny:
        """Make, fill and save the model."""
        sizes = {self.names.get(key, key): value for key, value in SIZES.items() if key not in self.without}
        config = getattr(transformers, self.config)(**{**sizes, **self.values})
        torch.manual_seed(17)
        model = getattr(transformers, self.model)(config).float().eval()
        randomize(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Norms are not called so everywhere.
                if parameter.dim() == 1 and name.endswith(".weight"):
                    parameter.normal_(1.0, 0.2)
        model.save_pretrained(folder)
        if self.saved_as is not None:
            rewrite(folder, self.saved_as)
        return Tiny(folder, model)


def rewrite(folder: Path, change: Callable[[Tensors, dict[str, Any]], tuple[Tensors, dict[str, Any]]]) -> None:
    """Save a model's tensors and configuration under other names."""
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors, values = change(load_file(file), json.loads(config.read_text()))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    config.write_text(json.dumps(values))


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """Return tensors with parts of their names replaced."""
    found = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = tensor
    return found


def common(config: dict[str, Any], architecture: str, **values: Any) -> dict[str, Any]:
    """Return a configuration of another architecture with the sizes of this one."""
    kept = (*SIZES, "dtype", "hidden_act", "rms_norm_eps", "tie_word_embeddings")
    sizes = {key: config[key] for key in kept if key in config}
    return {**sizes, "architectures": [architecture], "model_type": "x", "rope_theta": 10000.0, **values}


def as_internlm2(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Fuse Llama's q, k and v head by head, as InternLM 2 stores them."""
    found = dict(tensors)
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}.self_attn"
        q, k, v = (found.pop(f"{path}.{s}_proj.weight") for s in "qkv")
        groups, size = config["num_key_value_heads"], len(k) // config["num_key_value_heads"]
        parts = torch.cat([x.view(groups, -1, size, x.shape[1]) for x in (q, k, v)], dim=1)
        found[f"model.layers.{layer}.attention.wqkv.weight"] = parts.flatten(0, 2)
    names = {
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
    }
    return renamed(found, names), common(config, "InternLM2ForCausalLM", bias=False)


def as_baichuan(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Fuse Llama's q, k and v, as Baichuan stores them."""
    found = dict(tensors)
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}.self_attn"
        found[f"{path}.W_pack.weight"] = torch.cat([found.pop(f"{path}.{s}_proj.weight") for s in "qkv"])
    made = common(config, "BaiChuanForCausalLM")
    made["model_max_length"] = made.pop("max_position_embeddings")
    made.pop("num_key_value_heads")
    return found, made


def as_internlm3(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Give Llama InternLM 3's keys."""
    return tensors, common(config, "InternLM3ForCausalLM", bias=True, qkv_bias=True, head_dim=12)


def as_exaone(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Give Llama EXAONE 3's names and keys."""
    names = {
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
        "model.layers": "transformer.h",
        "self_attn.o_proj": "attn.attention.out_proj",
        "self_attn": "attn.attention",
        "gate_proj": "c_fc_0",
        "up_proj": "c_fc_1",
        "down_proj": "c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
    }
    made = common(config, "ExaoneForCausalLM", activation_function="silu", num_layers=config["num_hidden_layers"])
    made["layer_norm_epsilon"] = made.pop("rms_norm_eps")
    for key in ("num_hidden_layers", "hidden_act"):
        made.pop(key)
    return renamed(tensors, names), made


def as_minicpm(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Give Granite, with factors that MiniCPM has too, MiniCPM's keys."""
    depth = config["residual_multiplier"] * config["num_hidden_layers"] ** 0.5
    base = config["hidden_size"] / config["logits_scaling"]
    scale = config["embedding_multiplier"]
    made = common(config, "MiniCPMForCausalLM", scale_emb=scale, scale_depth=depth, dim_model_base=base)
    return tensors, made


def without_prefix(tensors: Tensors, config: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Name tensors as a model without its head has them."""
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}, config


def recipe(name: str, model: str = "", **values: Any) -> Recipe:
    """Return a recipe for classes of one name."""
    return Recipe(f"{name}Config", model or f"{name}ForCausalLM", values)


def old(name: str, model: str, **values: Any) -> Recipe:
    """Return a recipe for a class with GPT-2's keys."""
    return Recipe(f"{name}Config", model, values, OLD_NAMES, ("num_key_value_heads",))


def falcon(**values: Any) -> Recipe:
    """Return a recipe for Falcon."""
    return Recipe("FalconConfig", "FalconForCausalLM", values, without=("num_key_value_heads", "intermediate_size"))


def neox(**values: Any) -> Recipe:
    """Return a recipe for GPT-NeoX."""
    return Recipe("GPTNeoXConfig", "GPTNeoXForCausalLM", values, without=("num_key_value_heads",))


def opt(**values: Any) -> Recipe:
    """Return a recipe for OPT."""
    names = {"intermediate_size": "ffn_dim", "initializer_range": "init_std"}
    return Recipe("OPTConfig", "OPTForCausalLM", values, names, ("num_key_value_heads",))


BLOOM_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
BLOOM_LACKS = ("num_key_value_heads", "intermediate_size", "max_position_embeddings")
SLIDING: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
NTK: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}
CAPS: dict[str, Any] = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "attn_implementation": "eager"}
"""Small enough to act on small models; only one of transformers' implementations of attention knows soft caps."""
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "attention_multiplier": 12**-0.5,
}

RECIPES: dict[str, Recipe] = {
    "gemma": recipe("Gemma", head_dim=16),
    "gemma_untied": recipe("Gemma", head_dim=16, tie_word_embeddings=False),
    "gemma2": recipe("Gemma2", head_dim=16, query_pre_attn_scalar=20, **SLIDING, **CAPS),
    "gemma3": Recipe("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 16, "query_pre_attn_scalar": 20, **SLIDING}),
    "phi3": recipe("Phi3", sliding_window=WINDOW),
    "phi3_tied_half": recipe("Phi3", tie_word_embeddings=True, partial_rotary_factor=0.5),
    "stablelm": recipe("StableLm", partial_rotary_factor=0.5, use_qkv_bias=True),
    "stablelm_parallel": recipe(
        "StableLm", use_parallel_residual=True, qk_layernorm=True, tie_word_embeddings=True, partial_rotary_factor=0.5
    ),
    "cohere": recipe("Cohere"),
    "cohere_norms": recipe("Cohere", use_qk_norm=True, attention_bias=True, tie_word_embeddings=False),
    "cohere2": recipe("Cohere2", **SLIDING),
    "olmo": recipe("Olmo", clip_qkv=0.8),
    "olmo_tied": recipe("Olmo", tie_word_embeddings=True, attention_bias=True),
    "olmo2": recipe("Olmo2"),
    "olmo3": recipe("Olmo3", **SLIDING),
    "granite": recipe("Granite", **GRANITE),
    "granite_tied": recipe("Granite", **{**GRANITE, "attention_multiplier": 0.4}, tie_word_embeddings=True),
    "glm": recipe("Glm", head_dim=16),
    "glm4": recipe("Glm4", head_dim=16),
    "glm4_tied": recipe("Glm4", head_dim=12, tie_word_embeddings=True, attention_bias=False),
    "smollm3": recipe("SmolLM3", no_rope_layers=[1, 0]),
    "smollm3_windows": recipe(
        "SmolLM3", no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=WINDOW, tie_word_embeddings=False
    ),
    "exaone4": recipe("Exaone4", **SLIDING),
    "exaone4_full": recipe("Exaone4", sliding_window=None, layer_types=["full_attention"] * 2),
    "ernie4_5": recipe("Ernie4_5", head_dim=16),
    "ernie4_5_biases": recipe("Ernie4_5", head_dim=12, use_bias=True, tie_word_embeddings=False),
    "hunyuan": recipe("HunYuanDenseV1", head_dim=16),
    "hunyuan_ntk": recipe("HunYuanDenseV1", head_dim=16, rope_parameters=NTK, tie_word_embeddings=True),
    "seed_oss": recipe("SeedOss", head_dim=16),
    "seed_oss_biases": recipe("SeedOss", head_dim=12, attention_out_bias=True, tie_word_embeddings=True),
    "helium": recipe("Helium", head_dim=12),
    "arcee": recipe("Arcee", rope_parameters=YARN),
    "nemotron": recipe("Nemotron", partial_rotary_factor=0.5),
    "nemotron_biases": recipe("Nemotron", mlp_bias=True, attention_bias=True, partial_rotary_factor=0.5),
    "starcoder2": recipe("Starcoder2"),
    "starcoder2_window": recipe("Starcoder2", sliding_window=WINDOW, use_bias=False, tie_word_embeddings=False),
    "gpt2": old("GPT2", "GPT2LMHeadModel"),
    "gpt2_untied": old(
        "GPT2", "GPT2LMHeadModel", tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True, n_inner=None
    ),
    "gpt2_headless": Recipe(
        "GPT2Config", "GPT2LMHeadModel", {}, OLD_NAMES, ("num_key_value_heads",), saved_as=without_prefix
    ),
    "gpt_bigcode": old("GPTBigCode", "GPTBigCodeForCausalLM"),
    "gpt_bigcode_heads": old("GPTBigCode", "GPTBigCodeForCausalLM", multi_query=False, tie_word_embeddings=False),
    "gptj": old("GPTJ", "GPTJForCausalLM", rotary_dim=8),
    "gptj_tied": old("GPTJ", "GPTJForCausalLM", rotary_dim=12, tie_word_embeddings=True),
    "gpt_neox": neox(rotary_pct=0.5),
    "gpt_neox_sequential": neox(
        rotary_pct=1.0, use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True
    ),
    "phi": recipe("Phi"),
    "phi_norms": recipe("Phi", qk_layernorm=True, tie_word_embeddings=True),
    "bloom": Recipe("BloomConfig", "BloomForCausalLM", {"seq_length": LENGTH}, BLOOM_NAMES, BLOOM_LACKS),
    "bloom_heads": Recipe(
        "BloomConfig",
        "BloomForCausalLM",
        {"seq_length": LENGTH, "n_head": 6, "tie_word_embeddings": False},
        BLOOM_NAMES,
        BLOOM_LACKS,
        without_prefix,
    ),
    "falcon": falcon(),
    "falcon_new": falcon(new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=64),
    "falcon_one_norm": falcon(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "falcon_alibi": falcon(alibi=True, multi_query=False, parallel_attn=False, bias=True, tie_word_embeddings=False),
    "opt": opt(),
    "opt_post": opt(do_layer_norm_before=False, word_embed_proj_dim=32),
    "opt_plain": opt(enable_bias=False, layer_norm_elementwise_affine=False, tie_word_embeddings=False),
    "internlm2": Recipe("LlamaConfig", "LlamaForCausalLM", saved_as=as_internlm2),
    "baichuan": Recipe("LlamaConfig", "LlamaForCausalLM", without=("num_key_value_heads",), saved_as=as_baichuan),
    "internlm3": Recipe(
        "LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, saved_as=as_internlm3
    ),
    "exaone": Recipe("LlamaConfig", "LlamaForCausalLM", saved_as=as_exaone),
    "minicpm": Recipe("GraniteConfig", "GraniteForCausalLM", GRANITE, saved_as=as_minicpm),
}
"""Every architecture, with the variants that its configuration can ask for."""
