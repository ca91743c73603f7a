"""MiniMax 01 and M1: lightning attention in most layers, attention in the others, experts everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader
from jackfield_models.hybrid_parts import attends, mixed
from jackfield_models.linear_parts import LinearSizes
from jackfield_models.moe_decoder import Mixtral

BUFFERS = r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)"


class MiniMax(Mixtral):
    """``MiniMaxForCausalLM`` (arXiv:2501.08313): what layers add is weighed, and added behind norms."""

    name = "MiniMaxForCausalLM"
    summary = "MiniMax 01 and M1, as transformers has them"
    kinds: ClassVar[frozenset[str]] = frozenset({"MiniMaxForCausalLM"})
    names = replace(Mixtral.names, ignore=(*Mixtral.names.ignore, BUFFERS))
    max_position = 131072

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        hf.ignore("block_size")
        layers = values["num_layers"]
        default = ["linear_attention" if layer % 2 else "full_attention" for layer in range(layers)]
        attention = attends(hf.get("layer_types", default))
        weights = {part: cls.weights(hf, part) for part in ("full_attn", "linear_attn", "mlp")}
        sizes = LinearSizes(
            heads=values["num_heads"], size=values["head_size"], layers=layers, activation=values["activation"]
        )
        return {
            **super().details(hf, values),
            "order": "weighted",
            "residual_weights": tuple(
                (*weights["full_attn" if attended else "linear_attn"], *weights["mlp"]) for attended in attention
            ),
            "mixings": mixed(attention, sizes),
        }

    @classmethod
    def weights(cls, hf: ConfigReader, part: str) -> tuple[float, float]:
        """Return the weights of the stream and of what a part of a layer adds."""
        return float(hf.get(f"{part}_alpha_factor", 1.0)), float(hf.get(f"{part}_beta_factor", 1.0))
