"""Heads on the target's last hidden state: Medusa, and IBM's MLP speculators. Configuration and weight maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jackfield.errors import CheckpointError
from jackfield.interfaces import (
    AttentionGroup,
    BuildContext,
    ConfigReader,
    ModelArchitecture,
    TextConfig,
    WeightMap,
    WeightRule,
)

if TYPE_CHECKING:
    from torch import nn

FAR = 1 << 30
"""Heads see no positions."""
AUTHORS_COUNT = "medusa_num_heads"
"""What the authors of Medusa call the number of heads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadsConfig(TextConfig):
    """What both kinds need: how many heads there are."""

    num_heads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaConfig(HeadsConfig):
    """Medusa: residual layers of each head. one_head: all share the projection to the vocabulary. first: names are
    those of the authors' own files.
    """

    depth: int
    bias: bool
    one_head: bool
    first: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpSpeculatorConfig(HeadsConfig):
    """MLP speculator: inner_size: of its states. tied: heads share all but the first projection. scaled: the target's
    hidden state is normalized.
    """

    inner_size: int
    tied: bool
    scaled: bool


class MedusaModel(ModelArchitecture):
    """``MedusaModel``: heads of residual layers, each for one place (Cai et al. 2024, arXiv:2401.10774).

    The authors' own files (``medusa_lm_head``) have ``HEAD.LAYER.linear`` and behind the layers the projection,
    ``HEAD.LAYERS``; their config.json has ``medusa_num_heads`` and ``medusa_num_layers``, and no sizes.
    """

    name = "MedusaModel"
    summary = "Medusa heads"
    kinds: ClassVar[frozenset[str]] = frozenset({"MedusaModel"})
    tasks: ClassVar[frozenset[str]] = frozenset({"draft"})

    @classmethod
    def config(cls, hf: ConfigReader) -> MedusaConfig:
        """See ModelArchitecture.

        Raises:
            CheckpointError: the heads know only a part of the vocabulary.
        """
        vocab = hf.require("vocab_size", int)
        part = hf.get("truncated_vocab_size", vocab)
        if part != vocab:
            raise CheckpointError(
                "Medusa heads over a part of the vocabulary are not supported",
                field="truncated_vocab_size",
                value=part,
                remedy=f"use heads over all {vocab} tokens",
            )
        hf.ignore("max_paths", "topk", "max_seq_len", "base_model_name_or_path", "medusa_choices", "version")
        first = hf.get("num_heads") is None and hf.get(AUTHORS_COUNT) is not None
        return MedusaConfig(
            vocab_size=vocab,
            hidden_size=hf.require("hidden_size", int),
            num_layers=0,
            max_position=FAR,
            num_heads=hf.require(AUTHORS_COUNT if first else "num_heads", int),
            depth=hf.get("medusa_num_layers" if first else "num_hidden_layers", 1),
            bias=first or bool(hf.get("medusa_fc_bias", False)),
            one_head=bool(hf.get("original_lm_head", False)),
            first=first,
        )

    @classmethod
    def attention_groups(cls, config: MedusaConfig) -> tuple[AttentionGroup, ...]:
        """Return none: heads mix no tokens."""
        return ()

    @classmethod
    def weight_map(cls, config: MedusaConfig, container: str) -> WeightMap:
        """See ModelArchitecture; names may lack ``medusa_heads.``, and the authors' ``medusa_head.``."""
        if config.first:
            return _authors_map(config)
        start = "medusa_heads."
        rules = [
            WeightRule(f"{start}blocks.{head}.layers.{layer}", f"blocks.{head}.{layer}")
            for head in range(config.num_heads)
            for layer in range(config.depth)
        ]
        if config.one_head:
            rules.append(WeightRule(f"{start}lm_head", "heads.0"))
        else:
            rules += [WeightRule(f"{start}lm_heads.{head}", f"heads.{head}") for head in range(config.num_heads)]
        return WeightMap(tuple(rules), droppable=start)

    @classmethod
    def build(cls, config: MedusaConfig, ctx: BuildContext) -> nn.Module:
        """See ModelArchitecture."""
        from jackfield_spec_decode.heads_model import MedusaHeads

        return MedusaHeads(config, ctx)


def _authors_map(config: MedusaConfig) -> WeightMap:
    """Return the weight map of the authors' files, whose heads are sequences of layers that end with a projection."""
    start, heads = "medusa_head.", range(config.num_heads)
    layers = [
        WeightRule(f"{start}{head}.{layer}.linear", f"blocks.{head}.{layer}")
        for head in heads
        for layer in range(config.depth)
    ]
    projections = [WeightRule(f"{start}{head}.{config.depth}", f"heads.{head}") for head in heads]
    return WeightMap((*layers, *projections), droppable=start)


class MlpSpeculator(ModelArchitecture):
    """``MLPSpeculatorPreTrainedModel``: a small recurrent network over the tokens just drafted, which begins with the
    target's hidden state (Wertheimer et al. 2024, arXiv:2404.19124).
    """

    name = "MLPSpeculatorPreTrainedModel"
    summary = "IBM's MLP speculators"
    kinds: ClassVar[frozenset[str]] = frozenset({"MLPSpeculatorPreTrainedModel"})
    tasks: ClassVar[frozenset[str]] = frozenset({"draft"})

    @classmethod
    def config(cls, hf: ConfigReader) -> MlpSpeculatorConfig:
        """See ModelArchitecture."""
        size = hf.require("emb_dim", int)
        hf.ignore("n_candidates", "top_k_tokens_per_head")
        return MlpSpeculatorConfig(
            vocab_size=hf.require("vocab_size", int),
            hidden_size=size,
            num_layers=0,
            max_position=FAR,
            num_heads=hf.require("n_predict", int),
            inner_size=hf.get("inner_dim", 0) or size,
            tied=bool(hf.get("tie_weights", False)),
            scaled=bool(hf.get("scale_input", False)),
        )

    @classmethod
    def attention_groups(cls, config: MlpSpeculatorConfig) -> tuple[AttentionGroup, ...]:
        """Return none: heads mix no tokens."""
        return ()

    @classmethod
    def weight_map(cls, config: MlpSpeculatorConfig, container: str) -> WeightMap:
        """See ModelArchitecture; names may lack ``speculator.``. Tied heads are saved once or again and again."""
        start, rules, again = "speculator.", [], []
        for part in ("emb", "proj", "ln", "head"):
            for head in range(config.num_heads):
                own = 0 if not config.tied else min(head, 1) if part == "proj" else 0
                if not config.tied or head == own:
                    rules.append(WeightRule(f"{start}{part}.{head}", f"{part}.{head}"))
                else:
                    again.append(rf"(speculator\.)?{part}\.{head}\..*")
        return WeightMap(tuple(rules), (*again, r"(speculator\.)?ln0\..*"), droppable=start)

    @classmethod
    def build(cls, config: MlpSpeculatorConfig, ctx: BuildContext) -> nn.Module:
        """See ModelArchitecture."""
        from jackfield_spec_decode.heads_model import MlpHeads

        return MlpHeads(config, ctx)
