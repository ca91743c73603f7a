"""Qwen3.5's text models: Qwen3-Next's layers with a projection for each use, with experts and without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jackfield.interfaces import ConfigReader, WeightMap
from jackfield_models.decoder import DecoderConfig
from jackfield_models.llama import Llama
from jackfield_models.moe_parts import Sparse
from jackfield_models.names import also
from jackfield_models.qwen3_next import NAMES, Qwen3Next, delta_layers

TEXT = replace(NAMES, ignore=(*NAMES.ignore, r"model\.visual\..*"))
PREFIX = ("model.", "model.language_model.")
"""Checkpoints of models that see have their text model there."""


class Qwen35(Llama):
    """``Qwen3_5ForCausalLM``. Layers that only draft are left out, and so is what sees."""

    name = "Qwen3_5ForCausalLM"
    summary = "Qwen3.5, text"
    kinds: ClassVar[frozenset[str]] = frozenset({"Qwen3_5ForCausalLM"})
    draft_layers: ClassVar[str] = "Qwen3_5MTP"
    gguf_architectures: ClassVar[frozenset[str]] = frozenset()
    names = TEXT
    part = 0.25

    @classmethod
    def details(cls, hf: ConfigReader, values: Mapping[str, Any]) -> dict[str, Any]:
        """See Decoder."""
        return {**super().details(hf, values), **delta_layers(hf, values, fused=False)}

    @classmethod
    def weight_map(cls, config: DecoderConfig, container: str) -> WeightMap:
        """See ModelArchitecture."""
        return also(super().weight_map(config, container), PREFIX)


class Qwen35Moe(Qwen3Next):
    """``Qwen3_5MoeForCausalLM``: every layer has experts."""

    name = "Qwen3_5MoeForCausalLM"
    summary = "Qwen3.5 with experts, text"
    kinds: ClassVar[frozenset[str]] = frozenset({"Qwen3_5MoeForCausalLM"})
    draft_layers: ClassVar[str] = "Qwen3_5MoeMTP"
    names = TEXT
    fused = False

    @classmethod
    def inner_size(cls, hf: ConfigReader, width: int) -> int:
        """See Decoder. No layer has an MLP of that size."""
        return int(hf.get("intermediate_size", 0))

    @classmethod
    def sparse(cls, hf: ConfigReader, values: Mapping[str, Any]) -> Sparse:
        """See SparseDecoder."""
        found = super().sparse(hf, values)
        return replace(found, experts=replace(found.experts, renormalize=bool(hf.get("norm_topk_prob", True))))

    @classmethod
    def weight_map(cls, config: DecoderConfig, container: str) -> WeightMap:
        """See ModelArchitecture."""
        return also(super().weight_map(config, container), PREFIX)
