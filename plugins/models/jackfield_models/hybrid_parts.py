"""What models have in common that mix tokens by attention in some layers and by states in others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jackfield.errors import CheckpointError
from jackfield.interfaces import ConfigReader
from jackfield_models.mamba import read_mamba2
from jackfield_models.mamba_parts import Mamba2Sizes
from jackfield_models.names import ATTENTION, Names

ATTENTION_TYPES = frozenset({"full_attention", "attention"})
STATE_TYPES = frozenset({"linear_attention", "mamba", "mamba2"})

NAMES = Names(
    {"embed": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"},
    {
        **ATTENTION,
        "o": "self_attn.o_proj",
        "gate_up.gate": "feed_forward.gate_proj",
        "gate_up.up": "feed_forward.up_proj",
        "down": "feed_forward.down_proj",
        "input_norm": "input_layernorm",
        "post_norm": "pre_ff_layernorm",
    },
    mixings="mamba",
)
"""Names of Jamba, Bamba and Falcon H1."""


def attends(types: Sequence[str], states: frozenset[str] = STATE_TYPES) -> list[bool]:
    """Return which layers have attention, from HF's ``layer_types`` in its new or its old words.

    Raises:
        CheckpointError: a layer is of a type that is neither attention nor one of ``states``.
    """
    unknown = sorted(set(types) - ATTENTION_TYPES - states)
    if unknown:
        raise CheckpointError(
            f"layers of these types are not known: {', '.join(unknown)}",
            field="config.json: layer_types",
            value=list(types),
            remedy=f"this architecture has {', '.join(sorted(ATTENTION_TYPES | states))}",
        )
    return [kind in ATTENTION_TYPES for kind in types]


def mixed(attention: Sequence[bool], mixing: Any) -> tuple[Any, ...]:
    """Return per layer what mixes tokens: ``mixing``, or None where there is attention."""
    return tuple(None if attended else mixing for attended in attention)


def bamba_sizes(hf: ConfigReader, width: int, eps: float, **more: Any) -> Mamba2Sizes:
    """Return the sizes of Mamba-2 layers from Bamba's keys; ``more`` as Mamba2Sizes takes it."""
    hf.ignore("mamba_chunk_size", "use_mamba_kernels")
    heads, inner = int(hf.require("mamba_n_heads", int)), int(hf.get("mamba_expand", 2) * width)
    inner = int(more.pop("inner", 0) or inner)
    size = hf.get("mamba_d_head", "auto")
    sizes = read_mamba2(
        hf,
        heads="mamba_n_heads",
        head_size=inner // heads if size == "auto" else "mamba_d_head",
        groups="mamba_n_groups",
        state="mamba_d_state",
        width=int(hf.get("mamba_d_conv", 4)),
        bias=bool(hf.get("mamba_proj_bias", False)),
        conv_bias=bool(hf.get("mamba_conv_bias", True)),
        eps=eps,
        **more,
    )
    if sizes.inner != inner:
        raise CheckpointError(
            f"{sizes.heads} heads of {sizes.head_size} are not the {inner} features of a Mamba layer",
            field="config.json: mamba_d_head",
            value=size,
            remedy="their product is mamba_expand times the hidden size, or mamba_d_ssm",
        )
    return sizes
