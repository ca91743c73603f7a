"""Layers of a checkpoint that only draft: multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2).

Such a layer lies behind the target's own. It takes the target's final state at a position and the token behind it, and
says what comes behind that. Embedding and head are the target's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar

from jackfield.errors import CheckpointError
from jackfield.interfaces import BuildContext, ConfigReader, WeightMap, WeightRule
from jackfield_models.decoder import Decoder, DecoderConfig, expect
from jackfield_models.deepseek import DeepseekV3, DeepseekV32
from jackfield_models.moe_biased import Glm4Moe
from jackfield_models.names import LLAMA
from jackfield_models.qwen3_5 import Qwen35, Qwen35Moe
from jackfield_models.qwen3_next import Qwen3Next

if TYPE_CHECKING:
    from torch import nn

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Keys that say how many such layers there are; families differ in which they have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NextConfig(DecoderConfig):
    """A decoder of the one layer that drafts.

    Args:
        behind: layers of the target.
    """

    behind: int


class NextLayer(Decoder):
    """Base: a target's architecture, of which it is the layer behind the last."""

    tasks: ClassVar[frozenset[str]] = frozenset({"draft"})
    features: ClassVar[frozenset[str]] = frozenset()
    gguf_architectures: ClassVar[frozenset[str]] = frozenset()
    draft_layers: ClassVar[str] = ""
    parts: ClassVar[Mapping[str, str]] = {}
    """Checkpoint modules around the layer, by target."""
    copies: ClassVar[tuple[str, ...]] = ()
    """Checkpoint modules that are copies of the target's."""
    always_sparse: ClassVar[bool] = False
    """Whether it has experts even where all of the target's layers are too early for them."""

    @classmethod
    def config(cls, hf: ConfigReader) -> NextConfig:
        """See ModelArchitecture: the target's own configuration.

        Raises:
            CheckpointError: there is no such layer, or there are several: each of those is for one place of the
                drafts, and needs tokens that are not known yet where the next one is computed.
        """
        counts = {name: count for name in COUNTS if (count := hf.get(name)) is not None}
        for name, count in counts.items():
            if count != 1:
                raise CheckpointError(
                    f"the checkpoint has {count} layers that only draft, and one can be run",
                    field=f"config.json: {name}",
                    value=count,
                    remedy="use another speculative.method",
                )
        whole = super().config(hf)
        return cls.layer(whole, cls.like(whole))

    @classmethod
    def like(cls, config: DecoderConfig) -> int:
        """Return which of the target's layers it is like in all that is given layer by layer, but for the experts."""
        return config.num_layers - 1

    @classmethod
    def layer(cls, config: DecoderConfig, like: int) -> NextConfig:
        """Return a decoder of one layer. It has experts where any of the target's has."""
        values = {field.name: getattr(config, field.name) for field in fields(config)}
        for name in ("ropes", "windows", "scales", "mixings", "layer_norms", "residual_weights"):
            values[name] = values[name][like : like + 1]
        if config.sparse is not None:
            layers = frozenset({0} if config.sparse.layers or cls.always_sparse else ())
            values["sparse"] = replace(config.sparse, layers=layers)
        return NextConfig(**{**values, "num_layers": 1}, behind=config.num_layers)

    @classmethod
    def source(cls, config: NextConfig) -> str:
        """Return where the layer is in the checkpoint."""
        return f"model.layers.{config.behind}"

    @classmethod
    def weight_map(cls, config: DecoderConfig, container: str) -> WeightMap:
        """See ModelArchitecture."""
        assert isinstance(config, NextConfig)
        plain, layer = f"{cls.names.layers}.0.", cls.source(config)
        rules = [
            replace(rule, source=f"{layer}.{rule.source.removeprefix(plain)}")
            for rule in super().weight_map(config, container).rules
            if rule.source.startswith(plain)
        ]
        rules += [WeightRule(part.format(layer), target) for target, part in cls.parts.items()]
        copies = tuple(rf"{re.escape(name.format(layer))}\..*" for name in cls.copies)
        return WeightMap(tuple(rules), (*LLAMA.ignore, r"lm_head\..*", r"model\.visual\..*", *copies))

    @classmethod
    def build(cls, config: DecoderConfig, ctx: BuildContext) -> nn.Module:
        """See ModelArchitecture; the module is a :class:`jackfield.interfaces.DraftLayers`."""
        from jackfield_models.mtp_model import NextModule

        return NextModule(config, cls.attention_groups(config), ctx)


class NumberedNext(NextLayer):
    """Base: the layer is counted among the target's, as DeepSeek's are."""

    always_sparse: ClassVar[bool] = True
    parts: ClassVar[Mapping[str, str]] = {
        "token_norm": "{}.enorm",
        "state_norm": "{}.hnorm",
        "fc": "{}.eh_proj",
        "norm": "{}.shared_head.norm",
    }
    copies: ClassVar[tuple[str, ...]] = ("{}.embed_tokens", "{}.shared_head.head")


class NamedNext(NextLayer):
    """Base: the layer has attention, and is called ``mtp`` as Qwen's are."""

    parts: ClassVar[Mapping[str, str]] = {
        "token_norm": "mtp.pre_fc_norm_embedding",
        "state_norm": "mtp.pre_fc_norm_hidden",
        "fc": "mtp.fc",
        "norm": "mtp.norm",
    }
    copies: ClassVar[tuple[str, ...]] = ("mtp.embed_tokens", "mtp.lm_head")

    @classmethod
    def config(cls, hf: ConfigReader) -> NextConfig:
        """See NextLayer: embedding and output projection are the target's."""
        expect(hf, mtp_use_dedicated_embeddings=False)
        return super().config(hf)

    @classmethod
    def source(cls, config: NextConfig) -> str:
        """See NextLayer."""
        return "mtp.layers.0"

    @classmethod
    def layer(cls, config: DecoderConfig, like: int) -> NextConfig:
        """See NextLayer: there are no states."""
        return replace(super().layer(config, like), mixings=())


class DeepseekV3Next(NumberedNext, DeepseekV3):
    """``DeepSeekMTPModel``: of DeepSeek-V3."""

    name = "DeepSeekMTPModel"
    summary = "the drafting layer of DeepSeek-V3"
    kinds: ClassVar[frozenset[str]] = frozenset({"DeepSeekMTPModel"})


class DeepseekV32Next(NumberedNext, DeepseekV32):
    """``DeepseekV32MTPModel``: of DeepSeek-V3.2, with an indexer of its own."""

    name = "DeepseekV32MTPModel"
    summary = "the drafting layer of DeepSeek-V3.2"
    kinds: ClassVar[frozenset[str]] = frozenset({"DeepseekV32MTPModel"})


class Glm4MoeNext(NumberedNext, Glm4Moe):
    """``Glm4MoeMTPModel``: of GLM-4.5."""

    name = "Glm4MoeMTPModel"
    summary = "the drafting layer of GLM-4.5 and 4.6"
    kinds: ClassVar[frozenset[str]] = frozenset({"Glm4MoeMTPModel"})


class Qwen3NextNext(NamedNext, Qwen3Next):
    """``Qwen3NextMTP``: of Qwen3-Next."""

    name = "Qwen3NextMTP"
    summary = "the drafting layer of Qwen3-Next"
    kinds: ClassVar[frozenset[str]] = frozenset({"Qwen3NextMTP"})


class Qwen35Next(NamedNext, Qwen35):
    """``Qwen3_5MTP``: of Qwen3.5."""

    name = "Qwen3_5MTP"
    summary = "the drafting layer of Qwen3.5"
    kinds: ClassVar[frozenset[str]] = frozenset({"Qwen3_5MTP"})


class Qwen35MoeNext(NamedNext, Qwen35Moe):
    """``Qwen3_5MoeMTP``: of Qwen3.5 with experts."""

    name = "Qwen3_5MoeMTP"
    summary = "the drafting layer of Qwen3.5 with experts"
    kinds: ClassVar[frozenset[str]] = frozenset({"Qwen3_5MoeMTP"})
