"""OLMo 1 to 3: norms without weights at first, then norms behind attention and MLP and over whole projections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader
from jackfield_models.decoder import POST, Decoder, every, windows_by_type
from jackfield_models.names import LLAMA
from jackfield_models.rope import read_rope

OLMO_2 = {
    **{key: source for key, source in LLAMA.layer.items() if key not in ("input_norm", "post_norm")},
    "attention_norm": "post_attention_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}


class Olmo(Decoder):
    """``OlmoForCausalLM``: layer norms without weight and bias; q, k and v may be clipped."""

    name = "OlmoForCausalLM"
    summary = "OLMo 1"
    kinds: ClassVar[frozenset[str]] = frozenset({"OlmoForCausalLM"})
    eps = ("layer_norm_eps", 1e-5)

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        return {
            **attention_biases(hf),
            "norm_kind": "layer",
            "norm_weight": False,
            "norm_bias": False,
            "clip": float(hf.get("clip_qkv", 0.0)),
        }


class Olmo2(Decoder):
    """``Olmo2ForCausalLM``: norms behind attention and MLP alone, and over all queries and all keys."""

    name = "Olmo2ForCausalLM"
    summary = "OLMo 2"
    kinds: ClassVar[frozenset[str]] = frozenset({"Olmo2ForCausalLM"})
    names = replace(LLAMA, layer=OLMO_2)
    eps = ("rms_norm_eps", 1e-5)

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        return {**attention_biases(hf), "norms": POST, "qk_norm": "projection"}


class Olmo3(Olmo2):
    """``Olmo3ForCausalLM``: three of four layers have a window; the others alone may have a stretched embedding."""

    name = "Olmo3ForCausalLM"
    summary = "OLMo 3"
    kinds = frozenset({"Olmo3ForCausalLM"})
    theta = 500000.0

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        types = hf.get("layer_types") or every(4, values["num_layers"])
        full = read_rope(hf, values["head_size"], theta=cls.theta, kind="full_attention")
        local = replace(full, scaling=None)
        if hf.get("rope_parameters") is not None:
            local = read_rope(hf, values["head_size"], theta=cls.theta, kind="sliding_attention")
        return {
            **super().details(hf, values),
            "windows": windows_by_type(types, hf.get("sliding_window", 4096)),
            "ropes": tuple(local if kind == "sliding_attention" else full for kind in types),
        }


def attention_biases(hf: ConfigReader) -> dict[str, Any]:
    """Return biases of the attention's projections, which have one key."""
    bias = bool(hf.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias}
