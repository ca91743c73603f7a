"""Gemma 1 to 3, text: norms with an offset, scaled embeddings, soft caps, windows, two rotary bases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader
from jackfield_models.decoder import SANDWICH, Decoder, every, windows_by_type
from jackfield_models.names import LLAMA
from jackfield_models.rope import Rope, read_rope

TANH = "gelu_pytorch_tanh"
GEMMA_2 = {
    **LLAMA.layer,
    "attention_norm": "post_attention_layernorm",
    "post_norm": "pre_feedforward_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}


class Gemma(Decoder):
    """``GemmaForCausalLM``: norms with an offset of 1, embeddings scaled by the root of their width, gelu."""

    name = "GemmaForCausalLM"
    summary = "Gemma 1"
    kinds: ClassVar[frozenset[str]] = frozenset({"GemmaForCausalLM"})
    tied = True
    max_position = 8192

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what all Gemmas have. ``hidden_act`` of the first releases says gelu and means its tanh form."""
        hf.ignore("cache_implementation")
        bias = bool(hf.get("attention_bias", False))
        act = hf.get("hidden_activation") or hf.get("hidden_act", TANH)
        return {
            "head_size": hf.get("head_dim", 256),
            "activation": TANH if act == "gelu" else act,
            "norm_offset": 1.0,
            "embed_scale": float(values["hidden_size"]) ** 0.5,
            "qkv_bias": bias,
            "output_bias": bias,
        }


class Gemma2(Gemma):
    """``Gemma2ForCausalLM``: norms before and behind, soft caps on scores and logits, every second layer a window."""

    name = "Gemma2ForCausalLM"
    summary = "Gemma 2"
    kinds = frozenset({"Gemma2ForCausalLM"})
    names = replace(LLAMA, layer=GEMMA_2)
    caps: ClassVar[tuple[float, float]] = (50.0, 30.0)
    """Soft caps on scores and on logits where the configuration does not have the keys."""
    pattern: ClassVar[int] = 2

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Gemma."""
        layers = values["num_layers"]
        pattern = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or cls.pattern
        types = hf.get("layer_types") or every(pattern, layers)
        return {
            **super().details(hf, values),
            "norms": SANDWICH,
            "windows": windows_by_type(types, hf.get("sliding_window", 4096)),
            "scales": (float(hf.get("query_pre_attn_scalar", 256)) ** -0.5,) * layers,
            "softcap": float(hf.get("attn_logit_softcapping", cls.caps[0])),
            "logit_softcap": float(hf.get("final_logit_softcapping", cls.caps[1])),
        }


class Gemma3(Gemma2):
    """``Gemma3ForCausalLM``: normalized queries and keys, every sixth layer sees all, windows have their own base."""

    name = "Gemma3ForCausalLM"
    summary = "Gemma 3, text"
    kinds = frozenset({"Gemma3ForCausalLM"})
    caps = (0.0, 0.0)
    pattern = 6
    max_position = 131072

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Gemma."""
        found = super().details(hf, values)
        size = found["head_size"]
        full = read_rope(hf, size, theta=1000000.0, kind="full_attention")
        local = cls.local_rope(hf, size)
        return {**found, "qk_norm": "head", "ropes": tuple(local if w else full for w in found["windows"])}

    @classmethod
    def local_rope(cls, hf: ConfigReader, size: int) -> Rope:
        """Return the rotary embedding of layers with a window: never stretched by the older keys."""
        theta = float(hf.get("rope_local_base_freq", 10000.0))
        if hf.get("rope_parameters") is None:
            return Rope(size=size, theta=theta)
        return read_rope(hf, size, theta=theta, kind="sliding_attention")
