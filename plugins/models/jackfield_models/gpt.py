"""Decoders in the line of GPT-2: layer norms, biases, plain MLPs, and positions that are learned, rotary or linear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader
from jackfield_models.decoder import Decoder, expect
from jackfield_models.names import ATTENTION, NORMS, Names
from jackfield_models.rope import Rope, read_rope

QKV = ("qkv.q", "qkv.k", "qkv.v")
MASKS = (r".*\.attn\.(bias|masked_bias)", r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)")
"""Buffers of older checkpoints: masks and tables that are computed now."""
GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
GPT2 = Names(
    top={
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layer={
        **dict.fromkeys(QKV, "attn.c_attn"),
        "o": "attn.c_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
        "input_norm": "ln_1",
        "post_norm": "ln_2",
    },
    layers="transformer.h",
    ignore=MASKS,
    droppable="transformer.",
)
FUSED = {
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
    **dict.fromkeys(QKV, "self_attention.query_key_value"),
    "o": "self_attention.dense",
    **NORMS,
}


class Gpt(Decoder):
    """Base: layer norms, biases everywhere, an MLP that is not gated."""

    eps: ClassVar[tuple[str, float]] = ("layer_norm_epsilon", 1e-5)
    activation = ("activation_function", "gelu_new")

    @classmethod
    def inner_size(cls, hf: ConfigReader, width: int) -> int:
        """Return the MLP's inner size, four times the width where the configuration is silent."""
        return int(hf.get(cls.key("intermediate_size"), 4 * width))

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        return {
            "norm_kind": "layer",
            "gated": False,
            **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True),
        }


class Gpt2(Gpt):
    """``GPT2LMHeadModel``: learned positions; matrices lie transposed in the checkpoint."""

    name = "GPT2LMHeadModel"
    summary = "GPT-2 and models saved as such"
    kinds: ClassVar[frozenset[str]] = frozenset({"GPT2LMHeadModel"})
    names = replace(GPT2, transposed=True)
    keys = GPT2_KEYS
    tied = True
    max_position = 1024

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        hf.ignore("n_ctx", "reorder_and_upcast_attn")
        hf.ignore(*(f"summary_{x}" for x in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")))
        layers, size = values["num_layers"], values["head_size"]
        scale = size**-0.5 if hf.get("scale_attn_weights", True) else 1.0
        by_layer = bool(hf.get("scale_attn_by_inverse_layer_idx", False))
        return {
            **super().details(hf, values),
            "positions": values["max_position"],
            "ropes": (None,) * layers,
            "scales": tuple(scale / (i + 1 if by_layer else 1) for i in range(layers)),
        }


class GptBigCode(Gpt2):
    """``GPTBigCodeForCausalLM``: one cache head for all query heads."""

    name = "GPTBigCodeForCausalLM"
    summary = "StarCoder 1 and SantaCoder"
    kinds = frozenset({"GPTBigCodeForCausalLM"})
    names = replace(GPT2, by_head=True)
    activation = ("activation_function", "gelu_pytorch_tanh")

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        hf.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "runner_max_sequence_length")
        hf.ignore("inference_runner", "validate_runner_input", "pre_allocate_kv_cache", "max_batch_size")
        hf.ignore("num_key_value_heads", "max_sequence_length", "attention_type")
        one = bool(hf.get("multi_query", True))
        return {**super().details(hf, values), "num_kv_heads": 1 if one else values["num_heads"]}


class GptJ(Gpt):
    """``GPTJForCausalLM``: attention and MLP side by side behind one norm; rotary pairs are neighbours."""

    name = "GPTJForCausalLM"
    summary = "GPT-J"
    kinds: ClassVar[frozenset[str]] = frozenset({"GPTJForCausalLM"})
    names = Names(
        top={"embed": "transformer.wte", "norm": "transformer.ln_f", "head": "lm_head"},
        layer={
            **{f"qkv.{s}": f"attn.{s}_proj" for s in "qkv"},
            "o": "attn.out_proj",
            "up": "mlp.fc_in",
            "down": "mlp.fc_out",
            "input_norm": "ln_1",
        },
        layers="transformer.h",
        ignore=MASKS,
        droppable="transformer.",
    )
    keys = GPT2_KEYS
    paired = True

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        expect(hf, rotary=True, scale_attn_weights=True)
        hf.ignore("n_ctx")
        hf.ignore(*(f"summary_{x}" for x in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")))
        rope = Rope(size=hf.get("rotary_dim") or values["head_size"], theta=10000.0)
        return {
            **super().details(hf, values),
            "order": "parallel",
            "norms": frozenset({"input_norm"}),
            "qkv_bias": False,
            "output_bias": False,
            "head_bias": True,
            "ropes": (rope,) * values["num_layers"],
        }


class GptNeoX(Gpt):
    """``GPTNeoXForCausalLM``: attention and MLP side by side, each behind a norm; part of a head rotates."""

    name = "GPTNeoXForCausalLM"
    summary = "GPT-NeoX, Pythia, RedPajama"
    kinds: ClassVar[frozenset[str]] = frozenset({"GPTNeoXForCausalLM"})
    names = Names(
        top={"embed": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
        layer={**FUSED, **dict.fromkeys(QKV, "attention.query_key_value"), "o": "attention.dense"},
        layers="gpt_neox.layers",
        by_head=True,
        ignore=MASKS,
        droppable="gpt_neox.",
    )
    eps = ("layer_norm_eps", 1e-5)
    activation = ("hidden_act", "gelu")

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        bias = bool(hf.get("attention_bias", True))
        theta, part = float(hf.get("rotary_emb_base", 10000.0)), float(hf.get("rotary_pct", 0.25))
        return {
            **super().details(hf, values),
            "order": "parallel" if hf.get("use_parallel_residual", True) else "sequential",
            "qkv_bias": bias,
            "output_bias": bias,
            "ropes": (read_rope(hf, values["head_size"], theta=theta, part=part),) * values["num_layers"],
        }


class Phi(Gpt):
    """``PhiForCausalLM``: attention and MLP side by side behind one norm; half of a head rotates."""

    name = "PhiForCausalLM"
    summary = "Phi 1, 1.5 and 2"
    kinds: ClassVar[frozenset[str]] = frozenset({"PhiForCausalLM"})
    names = Names(
        top={"embed": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"},
        layer={
            **ATTENTION,
            "o": "self_attn.dense",
            "up": "mlp.fc1",
            "down": "mlp.fc2",
            "input_norm": "input_layernorm",
            "q_norm": "self_attn.q_layernorm",
            "k_norm": "self_attn.k_layernorm",
        },
    )
    eps = ("layer_norm_eps", 1e-5)
    activation = ("hidden_act", "gelu_new")
    part = 0.5

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        return {
            **super().details(hf, values),
            "order": "parallel",
            "norms": frozenset({"input_norm"}),
            "head_bias": True,
            "qk_norm": "head" if hf.get("qk_layernorm", False) else "",
            "qk_norm_kind": "layer",
            "qk_norm_bias": True,
        }
