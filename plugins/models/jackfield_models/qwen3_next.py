"""Qwen3-Next: gated delta networks in three of four layers, gated attention in the others, experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader
from jackfield_models.delta_parts import read_delta
from jackfield_models.hybrid_parts import attends, mixed
from jackfield_models.moe_decoder import SparseDecoder, qwen_experts
from jackfield_models.moe_parts import Sparse, expert_names
from jackfield_models.names import LLAMA

NAMES = replace(
    LLAMA,
    layer={**LLAMA.layer, "gate": "self_attn.q_proj"},
    experts=expert_names(beside="shared_expert", shared_gate="mlp.shared_expert_gate"),
    mixings="linear_attn",
    ignore=(r"mtp\..*",),
)


class Qwen3Next(SparseDecoder):
    """``Qwen3NextForCausalLM``. Layers that only draft are left out."""

    name = "Qwen3NextForCausalLM"
    summary = "Qwen3-Next"
    kinds: ClassVar[frozenset[str]] = frozenset({"Qwen3NextForCausalLM"})
    draft_layers: ClassVar[str] = "Qwen3NextMTP"
    names = NAMES
    part = 0.25
    fused: ClassVar[bool] = True
    """Whether checkpoints have two input projections of a gated delta network, and not one for each use."""

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        return {**super().details(hf, values), **delta_layers(hf, values, fused=cls.fused)}

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        shared = hf.get("shared_expert_intermediate_size", 0)
        return replace(qwen_experts(cls, hf, values), shared_size=shared, shared_gate=bool(shared))


def delta_layers(hf: ConfigReader, values: Mapping[str, Any], *, fused: bool) -> dict[str, Any]:
    """Return which layers have gated delta networks, and what their attention is like in the others."""
    every, layers = int(hf.get("full_attention_interval", 4)), values["num_layers"]
    default = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    delta = read_delta(hf, values["norm_eps"], fused=fused)
    hf.ignore("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    return {
        "norm_offset": 1.0,
        "qk_norm": "head",
        "output_gate": True,
        "mixings": mixed(attends(hf.get("layer_types", default)), delta),
    }
