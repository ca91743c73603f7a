"""Kimi Delta Attention in most layers and latent attention in the others, with experts: Kimi-Linear, Ling 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jackfield.errors import CheckpointError
from jackfield.interfaces import ConfigReader, WeightMap
from jackfield_models.decoder import DecoderConfig, expect
from jackfield_models.hybrid_parts import attends
from jackfield_models.kda_parts import KdaSizes
from jackfield_models.mla_parts import LatentSizes, read_latent
from jackfield_models.moe_decoder import SparseDecoder
from jackfield_models.moe_parts import NUMBERED, PROJECTIONS, Sparse, expert_names, first_int
from jackfield_models.names import LLAMA, Names, also

BELOW = "block_sparse_moe"
FORGET_GATE = tuple(
    (f"self_attn.{name}", f"self_attn.forget_gate.{name}")
    for name in ("f_a_proj", "f_b_proj", "f_proj", "A_log", "dt_bias")
)
"""Where transformers keeps what makes decays."""


class KimiLinear(SparseDecoder):
    """``KimiLinearForCausalLM`` (arXiv:2510.26692): nothing rotates."""

    name = "KimiLinearForCausalLM"
    summary = "Kimi-Linear 48B-A3B"
    kinds: ClassVar[frozenset[str]] = frozenset({"KimiLinearForCausalLM"})
    keys: ClassVar[Mapping[str, str]] = {"max_position_embeddings": "model_max_length"}
    names: ClassVar[Names] = replace(
        LLAMA,
        experts=expert_names(
            BELOW,
            each={key: (f"{BELOW}.experts.{{}}.{name}",) for key, name in NUMBERED.items()},
            shared={key: f"{BELOW}.shared_experts.{name}" for key, name in PROJECTIONS.items()},
        ),
    )
    eps = ("rms_norm_eps", 1e-5)
    max_position = 1048576

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        expect(hf, hidden_act="silu", mla_use_nope=True)
        hf.ignore("num_nextn_predict_layers", "mtp_loss_scaling_factor", "rope_theta", "rope_scaling")
        layers = values["num_layers"]
        latent, delta = cls.latent(hf, values), cls.delta(hf, values)
        return {
            **super().details(hf, values),
            "ropes": (None,) * layers,
            "mixings": tuple(latent if attended else delta for attended in cls.attention(hf, layers)),
        }

    @classmethod
    def attention(cls, hf: ConfigReader, layers: int) -> list[bool]:
        """Return which layers have latent attention; lists of such layers count from one."""
        types, listed = hf.get("layer_types"), hf.get("linear_attn_config", {}).get("full_attn_layers")
        if types is not None:
            return attends(types)
        if listed is not None:
            return [layer + 1 in listed for layer in range(layers)]
        return [layer > 0 and layer % 4 == 0 for layer in range(layers)]

    @classmethod
    def latent(cls, hf: ConfigReader, values: Mapping[str, Any]) -> LatentSizes:
        """Return the sizes of latent attention."""
        return replace(read_latent(hf, paired=False), rope=None, max_position=values["max_position"])

    @classmethod
    def delta(cls, hf: ConfigReader, values: Mapping[str, Any]) -> KdaSizes:
        """Return the sizes of delta attention."""
        nested = hf.get("linear_attn_config", {})
        heads = int(nested.get("num_heads") or hf.get("linear_num_heads", 32))
        return KdaSizes(
            heads=heads,
            size=int(nested.get("head_dim") or hf.get("linear_head_dim", 128)),
            width=int(nested.get("short_conv_kernel_size") or hf.get("linear_conv_kernel_dim", 4)),
            eps=values["norm_eps"],
            log_shape=(1, 1, heads, 1),
        )

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        expect(hf, moe_router_activation_func="sigmoid", moe_layer_freq=1, score_function="sigmoid")
        hf.ignore("use_grouped_topk", "moe_router_enable_expert_bias", "topk_method", "scoring_func")
        count, inner = first_int(hf, "num_experts", "n_routed_experts"), first_int(hf, "moe_intermediate_size")
        experts = cls.block(
            hf,
            values,
            inner,
            num_experts=count,
            top_k=first_int(hf, "num_experts_per_token", "num_experts_per_tok"),
            scoring="sigmoid",
            renormalize=bool(_either(hf, "moe_renormalize", "norm_topk_prob", True)),
            num_groups=_either(hf, "num_expert_group", "n_group", 1),
            top_groups=hf.get("topk_group", 1),
            group_score="top2",
            scale=float(hf.get("routed_scaling_factor", 1.0)),
        )
        return Sparse(
            experts=experts,
            layers=cls.sparse_layers(hf, values["num_layers"]),
            shared_size=_either(hf, "num_shared_experts", "n_shared_experts", 1) * inner,
            router_dtype="float32",
            choice_bias=(count,),
        )

    @classmethod
    def sparse_layers(cls, hf: ConfigReader, layers: int) -> frozenset[int]:
        """Return which layers have experts.

        Raises:
            CheckpointError: a layer's MLP is neither dense nor sparse.
        """
        dense, types = int(hf.get("first_k_dense_replace", 1)), hf.get("mlp_layer_types")
        if types is None:
            return frozenset(range(dense, layers))
        if unknown := sorted(set(types) - {"dense", "sparse"}):
            raise CheckpointError(
                f"MLPs of these types are not known: {', '.join(unknown)}",
                field="config.json: mlp_layer_types",
                value=types,
                remedy="this architecture has dense and sparse",
            )
        return frozenset(layer for layer, kind in enumerate(types) if kind == "sparse")

    @classmethod
    def weight_map(cls, config: DecoderConfig, container: str) -> WeightMap:
        """See ModelArchitecture."""
        found = super().weight_map(config, container)
        found = replace(found, ignore=(*found.ignore, rf"model\.layers\.{config.num_layers}\..*"))
        for names in cls.other_names():
            found = also(found, *names)
        return found

    @classmethod
    def other_names(cls) -> tuple[tuple[tuple[str, str], ...], ...]:
        """Return what checkpoints may call otherwise."""
        return ((".mlp.", f".{BELOW}."),), (*FORGET_GATE, (f".{BELOW}.", ".mlp."))


class BailingHybrid(KimiLinear):
    """``BailingHybridForCausalLM``: latent attention with a gate for each head; decays may have a bound."""

    name = "BailingHybridForCausalLM"
    summary = "Ling 3"
    kinds = frozenset({"BailingHybridForCausalLM"})
    names = replace(
        LLAMA,
        top={**LLAMA.top, "embed": "model.word_embeddings"},
        experts=expert_names(choice_bias=("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias")),
        mixings="attention",
    )
    eps = ("rms_norm_eps", 1e-6)
    max_position = 262144

    @classmethod
    def attention(cls, hf: ConfigReader, layers: int) -> list[bool]:
        """See KimiLinear."""
        every, types = int(hf.get("layer_group_size", 6)), hf.get("layer_types")
        return [(layer + 1) % every == 0 for layer in range(layers)] if types is None else attends(types)

    @classmethod
    def latent(cls, hf: ConfigReader, values: Mapping[str, Any]) -> LatentSizes:
        """See KimiLinear."""
        found = read_latent(hf, paired=True)
        return replace(found, max_position=values["max_position"], gated=True, out="dense")

    @classmethod
    def delta(cls, hf: ConfigReader, values: Mapping[str, Any]) -> KdaSizes:
        """See KimiLinear."""
        bound, width = float(hf.get("kda_lower_bound", -5.0)), hf.get("short_conv_kernel_size", 4)
        size = hf.get("head_dim", 128)
        return KdaSizes(
            heads=int(hf.get("linear_num_heads", values["num_heads"])),
            size=int(hf.get("linear_head_dim", size)),
            width=int(hf.get("linear_conv_kernel_dim", width)),
            eps=values["norm_eps"],
            low_rank=False,
            bound=bound if hf.get("kda_safe_gate", True) else None,
            out="dense",
        )

    @classmethod
    def other_names(cls) -> tuple[tuple[tuple[str, str], ...], ...]:
        """See KimiLinear."""
        embedding = ("word_embeddings", "embed_tokens")
        return ((embedding, (".attention.dense", ".self_attn.o_proj"), (".attention.", ".self_attn."), *FORGET_GATE),)


def _either(hf: ConfigReader, first: str, second: str, default: Any) -> Any:
    """Return the value of the first of two keys that is there."""
    other = hf.get(second, default)
    return hf.get(first, other)
