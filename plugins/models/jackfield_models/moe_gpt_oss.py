"""gpt-oss: attention sinks, every second layer with a window, experts with biases and a clamped activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader
from jackfield_models.decoder import Layers, windows_by_type
from jackfield_models.moe_decoder import SparseDecoder, every_layer
from jackfield_models.moe_parts import Sparse, expert_names, first_int
from jackfield_models.names import LLAMA, Names


class GptOss(SparseDecoder):
    """``GptOssForCausalLM``."""

    name = "GptOssForCausalLM"
    summary = "gpt-oss 20B and 120B, in mxfp4 or as plain numbers"
    kinds: ClassVar[frozenset[str]] = frozenset({"GptOssForCausalLM"})
    names: ClassVar[Names] = replace(
        LLAMA,
        layer={**LLAMA.layer, "sinks": "self_attn.sinks"},
        experts=expert_names(router=("mlp.router",), each={}, transposed=True, interleaved=True, shared={}),
    )
    eps = ("rms_norm_eps", 1e-5)
    theta = 150000.0

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        hf.ignore("initial_context_length", "experts_per_token")  # other words for what is read
        bias = bool(hf.get("attention_bias", True))
        return {**super().details(hf, values), "qkv_bias": bias, "output_bias": bias, "sinks": True}

    @classmethod
    def windows(cls, hf: ConfigReader, layers: int) -> Layers:
        """Return windows from ``layer_types``; where that is absent, the first and every second layer have one."""
        types = hf.get("layer_types") or [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
        return windows_by_type(types, hf.get("sliding_window"))

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        experts = cls.block(
            hf,
            values,
            values["intermediate_size"],
            num_experts=first_int(hf, "num_local_experts", "num_experts"),
            scoring="softmax_chosen",
            renormalize=False,
            activation="swiglu_oai",
            alpha=float(hf.get("swiglu_alpha", 1.702)),
            limit=float(hf.get("swiglu_limit", 7.0)),
            bias=True,
        )
        return Sparse(experts=experts, layers=every_layer(values), router_bias=True)
