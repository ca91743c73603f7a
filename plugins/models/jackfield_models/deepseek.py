"""DeepSeek V2, V3 and V3.2: multi-head latent attention, and experts in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader, WeightMap
from jackfield_models.decoder import DecoderConfig, expect
from jackfield_models.mla_parts import LatentSizes, read_indexed, read_latent
from jackfield_models.moe_biased import deepseek_experts
from jackfield_models.moe_decoder import SparseDecoder
from jackfield_models.moe_parts import Sparse


class DeepseekV3(SparseDecoder):
    """``DeepseekV3ForCausalLM`` (arXiv:2412.19437). Layers that only draft are left out."""

    name = "DeepseekV3ForCausalLM"
    summary = "DeepSeek V3, R1, V3.1"
    kinds: ClassVar[frozenset[str]] = frozenset({"DeepseekV3ForCausalLM"})
    draft_layers: ClassVar[str] = "DeepSeekMTPModel"

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        hf.ignore("num_nextn_predict_layers", "num_mtp_layers", "ep_size")
        layers = values["num_layers"]
        return {**super().details(hf, values), "mixings": (cls.latent(hf),) * layers, "ropes": (None,) * layers}

    @classmethod
    def latent(cls, hf: ConfigReader) -> LatentSizes:
        """Return the sizes of attention."""
        return read_latent(hf, paired=cls.latent_pairs(hf))

    @classmethod
    def latent_pairs(cls, hf: ConfigReader) -> bool:
        """Return whether rotary pairs lie next to each other in the checkpoint."""
        return bool(hf.get("rope_interleave", True))

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        expect(hf, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
        return deepseek_experts(cls, hf, values)

    @classmethod
    def weight_map(cls, config: DecoderConfig, container: str) -> WeightMap:
        """See ModelArchitecture."""
        found = super().weight_map(config, container)
        return replace(found, ignore=(*found.ignore, rf"model\.layers\.{config.num_layers}\..*"))


class DeepseekV32(DeepseekV3):
    """``DeepseekV32ForCausalLM`` (arXiv:2512.02556): V3 whose attention is to tokens that an indexer chooses."""

    name = "DeepseekV32ForCausalLM"
    summary = "DeepSeek V3.2"
    kinds: ClassVar[frozenset[str]] = frozenset({"DeepseekV32ForCausalLM"})
    draft_layers: ClassVar[str] = "DeepseekV32MTPModel"

    @classmethod
    def latent(cls, hf: ConfigReader) -> LatentSizes:
        """See DeepseekV3."""
        return read_indexed(hf, paired=cls.latent_pairs(hf))

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        found, layers = super().sparse(hf, values), range(values["num_layers"])
        kinds = ["sparse" if layer in found.layers else "dense" for layer in layers]
        expect(hf, layer_types=["indexed_attention"] * len(layers), mlp_layer_types=kinds)
        return found


class DeepseekV2(DeepseekV3):
    """``DeepseekV2ForCausalLM`` (arXiv:2405.04434): softmax scores, groups by their best expert, no bias."""

    name = "DeepseekV2ForCausalLM"
    summary = "DeepSeek V2, V2-Lite, Coder V2"
    kinds: ClassVar[frozenset[str]] = frozenset({"DeepseekV2ForCausalLM"})
    draft_layers: ClassVar[str] = ""

    @classmethod
    def latent_pairs(cls, hf: ConfigReader) -> bool:
        """See DeepseekV3."""
        return True

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        expect(hf, scoring_func="softmax", moe_layer_freq=1)
        grouped = hf.get("topk_method", "greedy") == "group_limited_greedy"
        expect(hf, topk_method="group_limited_greedy" if grouped else "greedy")
        found = deepseek_experts(cls, hf, values)
        experts = replace(
            found.experts,
            scoring="softmax",
            renormalize=bool(hf.get("norm_topk_prob", False)),
            group_score="max",
            num_groups=found.experts.num_groups if grouped else 1,
            top_groups=found.experts.top_groups if grouped else 1,
        )
        return replace(found, experts=experts, choice_bias=())
