"""Jamba: Mamba in most layers, attention without positions in the others, experts in every n-th."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader
from jackfield_models.decoder import expect
from jackfield_models.hybrid_parts import NAMES, mixed
from jackfield_models.mamba_parts import Mamba1Sizes
from jackfield_models.moe_decoder import SparseDecoder
from jackfield_models.moe_parts import Sparse, expert_names, first_int


class Jamba(SparseDecoder):
    """``JambaForCausalLM`` (arXiv:2403.19887)."""

    name = "JambaForCausalLM"
    summary = "Jamba 1, 1.5 and 3"
    kinds: ClassVar[frozenset[str]] = frozenset({"JambaForCausalLM"})
    names = replace(NAMES, experts=expert_names("feed_forward", router=("feed_forward.router",)))

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        expect(hf, hidden_act="silu")
        hf.ignore("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep")
        every, first = int(hf.get("attn_layer_period", 8)), int(hf.get("attn_layer_offset", 4))
        attention = [layer % every == first for layer in range(values["num_layers"])]
        return {
            **super().details(hf, values),
            "ropes": (None,) * values["num_layers"],
            "mixings": mixed(attention, cls.sizes(hf, values)),
        }

    @classmethod
    def sizes(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Mamba1Sizes:
        """Return the sizes of a Mamba layer."""
        width, rank = values["hidden_size"], hf.get("mamba_dt_rank", "auto")
        return Mamba1Sizes(
            inner=int(hf.get("mamba_expand", 2)) * width,
            state=int(hf.get("mamba_d_state", 16)),
            rank=-(-width // 16) if rank == "auto" else int(rank),
            width=int(hf.get("mamba_d_conv", 4)),
            bias=bool(hf.get("mamba_proj_bias", False)),
            conv_bias=bool(hf.get("mamba_conv_bias", True)),
            norms="weights",
            eps=values["norm_eps"],
        )

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        count = first_int(hf, "num_experts", "num_local_experts")
        experts = cls.block(hf, values, values["intermediate_size"], num_experts=count, renormalize=False)
        every, first = int(hf.get("expert_layer_period", 2)), int(hf.get("expert_layer_offset", 1))
        layers = {layer for layer in range(values["num_layers"]) if layer % every == first}
        return Sparse(experts=experts, layers=frozenset(layers if count > 1 else ()))
