"""Mamba-2 in most layers, attention in the others: Bamba, and Granite 4 with its factors and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader
from jackfield_models.decoder import expect
from jackfield_models.hybrid_parts import NAMES, attends, bamba_sizes, mixed
from jackfield_models.llama import Llama
from jackfield_models.moe_granite import GraniteMoeShared
from jackfield_models.moe_parts import Sparse
from jackfield_models.names import LLAMA
from jackfield_models.rope import read_rope


class Bamba(Llama):
    """``BambaForCausalLM``: half of each head rotates."""

    name = "BambaForCausalLM"
    summary = "Bamba 9B"
    kinds: ClassVar[frozenset[str]] = frozenset({"BambaForCausalLM"})
    gguf_architectures: ClassVar[frozenset[str]] = frozenset()
    names = NAMES
    eps = ("rms_norm_eps", 1e-5)
    max_position = 262144

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        expect(hf, hidden_act="silu")
        hf.ignore("num_logits_to_keep", "z_loss_coefficient")
        layers, size = values["num_layers"], values["head_size"]
        attention, turned = set(hf.get("attn_layer_indices", [])), int(hf.get("attn_rotary_emb", size // 2))
        sizes = bamba_sizes(hf, values["hidden_size"], values["norm_eps"])
        return {
            **super().details(hf, values),
            "ropes": (read_rope(hf, size, part=turned / size),) * layers,
            "mixings": mixed([layer in attention for layer in range(layers)], sizes),
        }


class GraniteHybrid(GraniteMoeShared):
    """``GraniteMoeHybridForCausalLM``: without experts, the MLP is the one that every token goes to."""

    name = "GraniteMoeHybridForCausalLM"
    summary = "Granite 4.0 H"
    kinds = frozenset({"GraniteMoeHybridForCausalLM"})
    names = replace(
        GraniteMoeShared.names,
        layer={
            **LLAMA.layer,
            "gate_up.gate": "shared_mlp.input_linear",
            "gate_up.up": "shared_mlp.input_linear",
            "down": "shared_mlp.output_linear",
        },
        mixings="mamba",
    )

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        expect(hf, hidden_act="silu", normalization_function="rmsnorm")
        layers = values["num_layers"]
        types = hf.get("layer_types") or hf.get("layers_block_type") or ["linear_attention"] * layers
        sizes = bamba_sizes(hf, values["hidden_size"], values["norm_eps"])
        rope = read_rope(hf, values["head_size"])
        found = super().details(hf, values)
        shared = hf.get("shared_intermediate_size", 1024)
        return {
            **found,
            "ropes": (rope if hf.get("position_embedding_type") == "rope" else None,) * layers,
            "mixings": mixed(attends(types), sizes),
            "intermediate_size": shared if not found["sparse"].layers else values["intermediate_size"],
        }

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        found = super().sparse(hf, values)
        return found if found.experts.num_experts else replace(found, layers=frozenset())
