"""Llama 4's text model: attention inside chunks where heads rotate, one expert per token, weighed at its input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from jackfield.errors import CheckpointError
from jackfield.interfaces import ConfigReader
from jackfield_models.decoder import Layers
from jackfield_models.moe_decoder import SparseDecoder
from jackfield_models.moe_parts import Sparse, expert_names, first_int
from jackfield_models.names import ATTENTION, NORMS, TOP, Names
from jackfield_models.rope import read_rope

BELOW = "feed_forward"
DENSE = {"gate_up.gate": f"{BELOW}.gate_proj", "gate_up.up": f"{BELOW}.up_proj", "down": f"{BELOW}.down_proj"}


class Llama4(SparseDecoder):
    """``Llama4ForCausalLM``."""

    name = "Llama4ForCausalLM"
    summary = "Llama 4 Scout and Maverick, text alone"
    kinds: ClassVar[frozenset[str]] = frozenset({"Llama4ForCausalLM"})
    names: ClassVar[Names] = Names(
        TOP,
        {**ATTENTION, "o": "self_attn.o_proj", **DENSE, **NORMS},
        experts=expert_names(BELOW, "shared_expert", router=(f"{BELOW}.router",), each={}, transposed=True),
    )
    eps = ("rms_norm_eps", 1e-5)
    theta = 500000.0
    paired = True

    @classmethod
    def inner_size(cls, hf: ConfigReader, width: int) -> int:
        """Return the inner size of layers without experts."""
        return first_int(hf, "intermediate_size_mlp")

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        layers, step = values["num_layers"], hf.get("no_rope_layer_interval", 4)
        turns = hf.get("no_rope_layers") or [int((i + 1) % step != 0) for i in range(layers)]
        rope = read_rope(hf, values["head_size"], theta=cls.theta)
        floor, scale = hf.get("floor_scale", 8192), hf.get("attn_scale", 0.1)
        tempered = bool(hf.get("attn_temperature_tuning", True))
        return {
            **super().details(hf, values),
            "ropes": tuple(rope if turn else None for turn in turns),
            "windows": _chunks(hf, turns),
            "window_kind": "chunked_local",
            "qk_norm": "head" if hf.get("use_qk_norm", True) else "",
            "qk_norm_weight": False,
            "qk_norm_last": True,
            "qk_norm_turned": True,
            "temperature": (float(floor), float(scale)) if tempered else None,
        }

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        inner, step = first_int(hf, "intermediate_size"), hf.get("interleave_moe_layer_step", 1)
        layers = hf.get("moe_layers")
        if layers is None:
            layers = range(step - 1, values["num_layers"], step)
        experts = cls.block(
            hf,
            values,
            inner,
            num_experts=first_int(hf, "num_local_experts"),
            scoring="sigmoid_chosen",
            renormalize=False,
            weigh_input=True,
        )
        return Sparse(experts=experts, layers=frozenset(layers), shared_size=inner)


def _chunks(hf: ConfigReader, turns: list[int]) -> Layers:
    """Return each layer's chunk; raises CheckpointError for a type of layer that is not known."""
    size = hf.get("attention_chunk_size")
    types = hf.get("layer_types") or ["chunked_attention" if turn else "full_attention" for turn in turns]
    unknown = sorted(set(types) - {"chunked_attention", "full_attention"})
    if unknown:
        raise CheckpointError(
            f"layers of these types are not known: {', '.join(unknown)}",
            field="config.json: layer_types",
            value=types,
            remedy="this architecture has chunked_attention and full_attention",
        )
    return tuple(size if kind == "chunked_attention" else None for kind in types)
