"""LFM2: gated short convolutions in most layers, attention in the others; with experts, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader
from jackfield_models.decoder import expect
from jackfield_models.hybrid_parts import attends, mixed
from jackfield_models.llama import Llama
from jackfield_models.moe_decoder import SparseDecoder
from jackfield_models.moe_parts import NUMBERED, Sparse, expert_names, first_int
from jackfield_models.names import ATTENTION, Names
from jackfield_models.short_conv_parts import ShortConvSizes

BELOW = "feed_forward"
NAMES = Names(
    {"embed": "model.embed_tokens", "norm": "model.embedding_norm", "head": "lm_head"},
    {
        **ATTENTION,
        "o": "self_attn.out_proj",
        "q_norm": "self_attn.q_layernorm",
        "k_norm": "self_attn.k_layernorm",
        **{key: f"{BELOW}.{name}" for key, name in NUMBERED.items()},
        "input_norm": "operator_norm",
        "post_norm": "ffn_norm",
    },
    mixings="conv",
    experts=expert_names(
        BELOW,
        choice_bias=(f"{BELOW}.expert_bias", f"{BELOW}.gate.e_score_correction_bias"),
        each={key: (f"{BELOW}.experts.{{}}.{name}",) for key, name in NUMBERED.items()},
    ),
)
OTHER_KEYS = (
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "num_heads",
    "theta",
)
"""Keys about initial values, or that say again what others say."""


class Lfm2(Llama):
    """``Lfm2ForCausalLM``: what an MLP's inner size is follows from three keys."""

    name = "Lfm2ForCausalLM"
    summary = "LFM2"
    kinds: ClassVar[frozenset[str]] = frozenset({"Lfm2ForCausalLM"})
    gguf_architectures: ClassVar[frozenset[str]] = frozenset()
    names: ClassVar[Names] = NAMES
    eps = ("norm_eps", 1e-5)
    theta = 1000000.0
    tied = True
    qk_norm = "head"
    max_position = 128000

    @classmethod
    def inner_size(cls, hf: ConfigReader, width: int) -> int:
        """See Decoder."""
        size = int(hf.get("block_ff_dim") or hf.require("intermediate_size", int))
        hf.ignore("intermediate_size")
        step, factor = int(hf.get("block_multiple_of", 256)), float(hf.get("block_ffn_dim_multiplier", 1.0))
        if not hf.get("block_auto_adjust_ff_dim", True):
            return size
        return -(-int(factor * int(2 * size / 3)) // step) * step

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        return {**super().details(hf, values), **convolutions(hf, values)}


class Lfm2Moe(SparseDecoder):
    """``Lfm2MoeForCausalLM``: experts by sigmoid scores behind the first layers."""

    name = "Lfm2MoeForCausalLM"
    summary = "LFM2 8B-A1B"
    kinds: ClassVar[frozenset[str]] = frozenset({"Lfm2MoeForCausalLM"})
    names: ClassVar[Names] = NAMES
    eps = ("norm_eps", 1e-5)
    theta = 1000000.0
    tied = True
    qk_norm = "head"
    max_position = 128000

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        return {**super().details(hf, values), **convolutions(hf, values)}

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        count, dense = first_int(hf, "num_experts", "num_local_experts"), int(hf.get("num_dense_layers", 2))
        experts = cls.block(
            hf,
            values,
            first_int(hf, "moe_intermediate_size"),
            num_experts=count,
            scoring="sigmoid",
            renormalize=bool(hf.get("norm_topk_prob", True)),
            scale=float(hf.get("routed_scaling_factor", 1.0)),
        )
        bias = (count,) if hf.get("use_expert_bias", True) else ()
        return Sparse(experts=experts, layers=frozenset(range(dense, values["num_layers"])), choice_bias=bias)


def convolutions(hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return which layers have convolutions, and whether the head is the embedding."""
    expect(hf, hidden_act="silu", block_use_swiglu=True, use_pos_enc=True)
    hf.ignore(*OTHER_KEYS)
    layers = range(values["num_layers"])
    full = hf.get("full_attn_idxs", layers)
    types = hf.get("layer_types") or ["full_attention" if layer in full else "conv" for layer in layers]
    sizes = ShortConvSizes(
        channels=values["hidden_size"], width=int(hf.get("conv_L_cache", 3)), bias=bool(hf.get("conv_bias", False))
    )
    return {
        "mixings": mixed(attends(types, frozenset({"conv"})), sizes),
        "tie_embeddings": bool(hf.get("tie_embedding", values["tie_embeddings"])),
    }
