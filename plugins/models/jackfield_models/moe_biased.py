"""Decoders whose experts are chosen with a bias: GLM-4.5, dots.llm1, ERNIE 4.5; and Hunyuan, which has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader, WeightMap
from jackfield_models.decoder import DecoderConfig, Layers, expect, windows_by_type
from jackfield_models.moe_decoder import SparseDecoder, every_layer
from jackfield_models.moe_parts import Sparse, expert_names, first_int, same
from jackfield_models.names import LLAMA, Names


def deepseek_experts(cls: type[SparseDecoder], hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
    """Return the experts that DeepSeek-V3's keys describe: sigmoid scores, groups by their two best, a bias of the
    choice; the first layers have an MLP (arXiv:2412.19437).
    """
    count, inner = first_int(hf, "n_routed_experts", "num_local_experts"), first_int(hf, "moe_intermediate_size")
    experts = cls.block(
        hf,
        values,
        inner,
        num_experts=count,
        scoring="sigmoid",
        renormalize=bool(hf.get("norm_topk_prob", True)),
        num_groups=hf.get("n_group", 1),
        top_groups=hf.get("topk_group", 1),
        group_score="top2",
        scale=float(hf.get("routed_scaling_factor", 1.0)),
    )
    dense = hf.get("first_k_dense_replace", 0)
    return Sparse(
        experts=experts,
        layers=frozenset(range(dense, values["num_layers"])),
        shared_size=(hf.get("n_shared_experts") or 0) * inner,
        router_dtype="float32",
        choice_bias=(count,),
    )


class Glm4Moe(SparseDecoder):
    """``Glm4MoeForCausalLM``: half of each head rotates; DeepSeek-V3's routing. Layers that only draft are left out."""

    name = "Glm4MoeForCausalLM"
    summary = "GLM-4.5 and 4.6"
    kinds: ClassVar[frozenset[str]] = frozenset({"Glm4MoeForCausalLM"})
    draft_layers: ClassVar[str] = "Glm4MoeMTPModel"
    eps = ("rms_norm_eps", 1e-5)
    part = 0.5

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        hf.ignore("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types")
        normed = bool(hf.get("use_qk_norm", False))
        return {**super().details(hf, values), "output_bias": False, "qk_norm": "head" if normed else ""}

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        return deepseek_experts(cls, hf, values)

    @classmethod
    def weight_map(cls, config: DecoderConfig, container: str) -> WeightMap:
        """See ModelArchitecture."""
        found = super().weight_map(config, container)
        return replace(found, ignore=(*found.ignore, rf"model\.layers\.{config.num_layers}\..*"))


class Dots1(SparseDecoder):
    """``Dots1ForCausalLM``: Qwen 3's attention, DeepSeek-V3's routing."""

    name = "Dots1ForCausalLM"
    summary = "dots.llm1"
    kinds: ClassVar[frozenset[str]] = frozenset({"Dots1ForCausalLM"})
    qk_norm = "head"

    @classmethod
    def windows(cls, hf: ConfigReader, layers: int) -> Layers:
        """Return windows from ``layer_types``, or from ``max_window_layers`` where that is absent."""
        window, first = hf.get("sliding_window"), hf.get("max_window_layers", layers)
        types = hf.get("layer_types")
        if types is not None:
            return windows_by_type(types, window)
        return tuple(window if i >= first else None for i in range(layers))

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        expect(hf, scoring_func="noaux_tc", topk_method="noaux_tc")
        hf.ignore("moe_layer_freq")
        return deepseek_experts(cls, hf, values)


class ErnieMoe(SparseDecoder):
    """``Ernie4_5_MoeForCausalLM``: rotary pairs are neighbours; softmax scores with a bias of the choice."""

    name = "Ernie4_5_MoeForCausalLM"
    summary = "ERNIE 4.5 21B-A3B and 300B-A47B"
    kinds: ClassVar[frozenset[str]] = frozenset({"Ernie4_5_MoeForCausalLM"})
    names: ClassVar[Names] = replace(
        LLAMA,
        experts=expert_names(
            choice_bias=("mlp.moe_statics.e_score_correction_bias", "mlp.gate.moe_statics.e_score_correction_bias")
        ),
        # Layers that only draft.
        ignore=(*LLAMA.ignore, r"model\.mtp_.*"),
    )
    eps = ("rms_norm_eps", 1e-5)
    tied = True
    paired = True
    theta = 500000.0

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        expect(hf, moe_use_aux_free=True, moe_gate="topk", moe_use_hard_gate=False, moe_group_experts=False)
        hf.ignore(
            "num_nextn_predict_layers", "use_rmsnorm", "compression_ratio", "moe_capacity", "moe_num_shared_expert"
        )
        bias = bool(hf.get("use_bias", False))
        return {
            **super().details(hf, values),
            "qkv_bias": bias,
            "output_bias": bias,
            "mlp_bias": bias,
            "head_bias": bias,
        }

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        count, inner = first_int(hf, "moe_num_experts", "num_experts"), first_int(hf, "moe_intermediate_size")
        experts = cls.block(
            hf,
            values,
            inner,
            num_experts=count,
            top_k=first_int(hf, "moe_k", "num_experts_per_tok"),
            floor=float(hf.get("moe_norm_min", 1e-12)),
        )
        last, step = hf.get("moe_layer_end_index", -1), hf.get("moe_layer_interval", 1)
        last = values["num_layers"] - 1 if last == -1 else last
        between = range(hf.get("moe_layer_start_index", 1), last + 1)
        return Sparse(
            experts=experts,
            layers=frozenset(layer for layer in between if (layer + 1) % step == 0),
            shared_size=hf.get("moe_num_shared_experts", 0) * inner,
            router_dtype="float32",
            choice_bias=(1, count),
        )


class HunyuanMoe(SparseDecoder):
    """``HunYuanMoEV1ForCausalLM``: queries and keys are normalized after they are rotated; one expert for every
    token.
    """

    name = "HunYuanMoEV1ForCausalLM"
    summary = "Hunyuan A13B"
    kinds: ClassVar[frozenset[str]] = frozenset({"HunYuanMoEV1ForCausalLM"})
    names: ClassVar[Names] = replace(
        LLAMA,
        layer={**LLAMA.layer, "q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
        experts=expert_names(beside="shared_mlp", router=("mlp.gate.wg",)),
    )
    eps = ("rms_norm_eps", 1e-5)
    qk_norm = "head"

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Llama."""
        expect(
            hf,
            use_qk_norm=True,
            use_cla=False,
            use_mixed_mlp_moe=True,
            norm_topk_prob=True,
            add_classification_head=False,
        )
        hf.ignore("eod_token_id", "org_vocab_size", "im_start_id", "im_end_id", "im_newline_id", "text_start_id")
        hf.ignore(
            "text_end_id", "image_token_id", "mask_init_id", "pad_id", "bos_id", "eos_id", "sep_id", "cla_share_factor"
        )
        hf.ignore("attention_head_dim", "moe_drop_tokens", "moe_random_routing_dropped_token", "moe_layer_num_skipped")
        hf.ignore("group_limited_greedy", "n_group", "topk_group", "routed_scaling_factor", "position_embedding_xdrope")
        return {**super().details(hf, values), "qk_norm_last": True}

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder. Lists with a number for each layer must hold one number alone."""
        inner = same(hf.get("moe_intermediate_size")) or values["intermediate_size"]
        expect(hf, moe_intermediate_size=hf.get("moe_intermediate_size"))
        shared = same(hf.get("num_shared_expert", 1))
        experts = cls.block(
            hf, values, inner, num_experts=same(hf.get("num_experts")), top_k=same(hf.get("moe_topk", 1))
        )
        return Sparse(experts=experts, layers=every_layer(values), shared_size=shared * inner, router_dtype="float32")
