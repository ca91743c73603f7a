"""GLM-4, StableLM, StarCoder 2 and Nemotron: Llama with one or two differences each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader
from jackfield_models.decoder import PRE, SANDWICH, Decoder, expect
from jackfield_models.names import LLAMA

FUSED_GATE = {**LLAMA.layer, **dict.fromkeys(("gate_up.gate", "gate_up.up"), "mlp.gate_up_proj")}


class Glm(Decoder):
    """``GlmForCausalLM``: half of each head rotates, its pairs are neighbours; gate and up are fused."""

    name = "GlmForCausalLM"
    summary = "GLM-4 9B of 2024"
    kinds: ClassVar[frozenset[str]] = frozenset({"GlmForCausalLM"})
    names = replace(LLAMA, layer=FUSED_GATE)
    paired = True
    part = 0.5
    eps = ("rms_norm_eps", 1.5625e-07)

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        return {"qkv_bias": bool(hf.get("attention_bias", True)), "head_size": hf.get("head_dim", 128)}


class Glm4(Glm):
    """``Glm4ForCausalLM``: norms behind attention and MLP too."""

    name = "Glm4ForCausalLM"
    summary = "GLM-4 of 2025"
    kinds = frozenset({"Glm4ForCausalLM"})
    names = replace(
        LLAMA,
        layer={**FUSED_GATE, "attention_norm": "post_self_attn_layernorm", "mlp_norm": "post_mlp_layernorm"},
    )

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        return {**super().details(hf, values), "norms": SANDWICH}


class StableLm(Decoder):
    """``StableLmForCausalLM``: layer norms, a quarter of each head rotates, attention and MLP may be side by side."""

    name = "StableLmForCausalLM"
    summary = "StableLM 3B, 2 1.6B and 2 12B"
    kinds: ClassVar[frozenset[str]] = frozenset({"StableLmForCausalLM"})
    names = replace(
        LLAMA,
        layer={**LLAMA.layer, "q_norm": "self_attn.q_layernorm.norms", "k_norm": "self_attn.k_layernorm.norms"},
        each_head=True,
    )
    eps = ("layer_norm_eps", 1e-5)
    part = 0.25

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        parallel = bool(hf.get("use_parallel_residual", False))
        return {
            "norm_kind": "layer",
            "qkv_bias": bool(hf.get("use_qkv_bias", False)),
            "qk_norm": "heads" if hf.get("qk_layernorm", False) else "",
            "qk_norm_kind": "layer",
            "order": "parallel" if parallel else "sequential",
            "norms": frozenset({"input_norm"}) if parallel else PRE,
        }


class StarCoder2(Decoder):
    """``Starcoder2ForCausalLM``: layer norms, an MLP that is not gated, one key for all biases, a window."""

    name = "Starcoder2ForCausalLM"
    summary = "StarCoder 2"
    kinds: ClassVar[frozenset[str]] = frozenset({"Starcoder2ForCausalLM"})
    names = replace(LLAMA, layer={**LLAMA.layer, "up": "mlp.c_fc", "down": "mlp.c_proj"})
    tied = True
    eps = ("norm_epsilon", 1e-5)
    activation = ("hidden_act", "gelu_pytorch_tanh")
    max_position = 4096

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        expect(hf, mlp_type="default", norm_type="layer_norm")
        hf.ignore("residual_dropout", "layer_norm_eps")
        bias = bool(hf.get("use_bias", True))
        return {
            "norm_kind": "layer",
            "gated": False,
            **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), bias),
            "windows": (hf.get("sliding_window"),) * values["num_layers"],
        }


class Nemotron(Decoder):
    """``NemotronForCausalLM``: layer norms with an offset, squared ReLU, half of each head rotates."""

    name = "NemotronForCausalLM"
    summary = "Nemotron 3 and 4, Minitron"
    kinds: ClassVar[frozenset[str]] = frozenset({"NemotronForCausalLM"})
    names = replace(LLAMA, layer={**LLAMA.layer, "up": "mlp.up_proj"})
    eps = ("norm_eps", 1e-5)
    activation = ("hidden_act", "relu2")
    part = 0.5
    max_position = 4096

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        bias = bool(hf.get("attention_bias", False))
        return {
            "norm_kind": "layer",
            "norm_offset": 1.0,
            "gated": False,
            "qkv_bias": bias,
            "output_bias": bias,
            "mlp_bias": bool(hf.get("mlp_bias", False)),
        }
