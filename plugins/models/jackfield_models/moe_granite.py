"""Granite with experts, and with one more for every token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader
from jackfield_models.moe_decoder import SparseDecoder, every_layer
from jackfield_models.moe_parts import Sparse, expert_names, first_int
from jackfield_models.names import LLAMA, Names
from jackfield_models.relatives import Granite

BELOW = "block_sparse_moe"
SHARED = {"gate_up.gate": "shared_mlp.input_linear", "gate_up.up": "shared_mlp.input_linear"}


class GraniteMoe(SparseDecoder, Granite):
    """``GraniteMoeForCausalLM``: Granite's factors; the softmax is over the chosen experts."""

    name = "GraniteMoeForCausalLM"
    summary = "Granite 3 1B-A400M and 3B-A800M"
    kinds: ClassVar[frozenset[str]] = frozenset({"GraniteMoeForCausalLM"})
    names: ClassVar[Names] = replace(
        LLAMA,
        experts=expert_names(
            router=(f"{BELOW}.router.layer", f"{BELOW}.router"),
            each={},
            together={
                "gate_up": (f"{BELOW}.input_linear", f"{BELOW}.experts.gate_up_proj"),
                "down": (f"{BELOW}.output_linear", f"{BELOW}.experts.down_proj"),
            },
            shared={**SHARED, "down": "shared_mlp.output_linear"},
        ),
    )

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        experts = cls.block(
            hf,
            values,
            values["intermediate_size"],
            num_experts=first_int(hf, "num_local_experts"),
            scoring="softmax_chosen",
            renormalize=False,
        )
        return Sparse(experts=experts, layers=every_layer(values))


class GraniteMoeShared(GraniteMoe):
    """``GraniteMoeSharedForCausalLM``: an MLP for every token beside the experts."""

    name = "GraniteMoeSharedForCausalLM"
    summary = "Granite with shared experts"
    kinds = frozenset({"GraniteMoeSharedForCausalLM"})

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        return replace(super().sparse(hf, values), shared_size=hf.get("shared_intermediate_size", 0))
