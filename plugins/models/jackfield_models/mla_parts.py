"""Sizes of multi-head latent attention, and where checkpoints keep its weights. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from jackfield.interfaces import AttentionGroup, ConfigReader, OutputShard, RowOrder, WeightRule
from jackfield_models.mamba_parts import cut_rules
from jackfield_models.rope import Rope, read_rope


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSizes:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Args:
        heads: query heads. q_rank: width of the queries' latent, 0 where queries come straight from the stream.
            latent: width of the keys' and values'. plain, turned: features of a query or key head without and with
            rotation. value: size of a value head. rope: of the turned features, or None where nothing turns;
            max_position: of it. paired: rotary pairs lie next to each other in the checkpoint. bias: whether the
            projections down and out have one. eps: of the norms over latents. gated: what each head gives is weighed by
            a projection of the stream. out: name of the output's projection.
    """

    heads: int
    q_rank: int
    latent: int
    plain: int
    turned: int
    value: int
    rope: Rope | None
    max_position: int
    paired: bool = True
    bias: bool = False
    eps: float = 1e-6
    gated: bool = False
    out: str = "o_proj"
    kind: ClassVar[str] = "mla"

    @property
    def scale(self) -> float:
        """Factor on scores; YaRN's second factor (``mscale_all_dim``) is in it, squared."""
        scale = 1.0 / math.sqrt(self.plain + self.turned)
        scaling = (self.rope.scaling if self.rope is not None else None) or {}
        factor, amount = float(scaling.get("factor") or 1.0), float(scaling.get("mscale_all_dim") or 0.0)
        return scale * (0.1 * amount * math.log(factor) + 1.0) ** 2 if factor > 1.0 and amount else scale

    @property
    def down(self) -> tuple[OutputShard, ...]:
        """What is projected from the stream at once."""
        parts = {"q": self.q_rank, "latent": self.latent, "rope": self.turned}
        return tuple(OutputShard(name, size) for name, size in parts.items() if size)

    def group(self, name: str, layers: tuple[int, ...]) -> AttentionGroup:
        """Return the group of such layers."""
        return AttentionGroup(
            name=name,
            kind=self.kind,
            layers=layers,
            num_heads=self.heads,
            num_kv_heads=1,
            head_size=self.plain + self.turned,
            value_head_size=self.value,
            scale=self.scale,
            extra={"latent_size": self.latent, "rope_size": self.turned},
        )

    def rules(self, source: str, target: str) -> Iterator[WeightRule]:
        """Return where the weights of a layer go; ``source`` and ``target`` are the mixer's paths."""
        pairs = RowOrder("interleaved_pairs", self.heads, self.turned, self.plain) if self.paired else None
        yield WeightRule(f"{source}.{'q_b_proj' if self.q_rank else 'q_proj'}", f"{target}.q_up", rows=pairs)
        if self.q_rank:
            yield WeightRule(f"{source}.q_a_proj", f"{target}.down", "q")
            yield WeightRule(f"{source}.q_a_layernorm", f"{target}.q_norm")
        for rule in cut_rules(f"{source}.kv_a_proj_with_mqa", f"{target}.down", self.down[-2:]):
            paired = self.paired and rule.shard == "rope"
            yield _with_rows(rule, RowOrder("interleaved_pairs", 1)) if paired else rule
        for name, part in (("kv_a_layernorm", "kv_norm"), ("kv_b_proj", "kv_up"), (self.out, "out")):
            yield WeightRule(f"{source}.{name}", f"{target}.{part}")
        if self.gated:
            yield WeightRule(f"{source}.g_proj", f"{target}.gate")


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedSizes(LatentSizes):
    """Multi-head latent attention to tokens that an indexer chooses (DeepSeek-V3.2, arXiv:2512.02556, section 2.1).

    Args:
        index_heads, index_size: of what the indexer compares; its queries come from the queries' latent, and their
            first ``turned`` features rotate, in halves. index_topk: most tokens that are chosen for a query.
    """

    index_heads: int
    index_size: int
    index_topk: int
    kind: ClassVar[str] = "mla_sparse"

    def group(self, name: str, layers: tuple[int, ...]) -> AttentionGroup:
        """See LatentSizes."""
        found = LatentSizes.group(self, name, layers)
        index = {"index_heads": self.index_heads, "index_size": self.index_size, "index_topk": self.index_topk}
        return replace(found, extra={**found.extra, **index})

    def rules(self, source: str, target: str) -> Iterator[WeightRule]:
        """See LatentSizes."""
        yield from LatentSizes.rules(self, source, target)
        for name, part in (("wq_b", "q"), ("wk", "k"), ("k_norm", "k_norm"), ("weights_proj", "weight")):
            yield WeightRule(f"{source}.indexer.{name}", f"{target}.index_{part}")


def _with_rows(rule: WeightRule, rows: RowOrder) -> WeightRule:
    return WeightRule(rule.source, rule.target, rule.shard, rows, cut=rule.cut)


def read_latent(hf: ConfigReader, *, paired: bool) -> LatentSizes:
    """Return the sizes from DeepSeek's keys."""
    hf.ignore("head_dim", "qk_head_dim", "num_key_value_heads")
    turned = int(hf.require("qk_rope_head_dim", int))
    return LatentSizes(
        heads=int(hf.require("num_attention_heads", int)),
        q_rank=int(hf.get("q_lora_rank", 0)),
        latent=int(hf.require("kv_lora_rank", int)),
        plain=int(hf.require("qk_nope_head_dim", int)),
        turned=turned,
        value=int(hf.require("v_head_dim", int)),
        rope=read_rope(hf, turned),
        max_position=int(hf.get("max_position_embeddings", 4096)),
        paired=paired,
        bias=bool(hf.get("attention_bias", False)),
    )


def read_indexed(hf: ConfigReader, *, paired: bool) -> IndexedSizes:
    """Return the sizes from the keys of DeepSeek-V3.2.

    Raises:
        CheckpointError: queries have no latent, which the indexer takes its own from.
    """
    latent = read_latent(hf, paired=paired)
    hf.require("q_lora_rank", int)
    return IndexedSizes(
        **{field.name: getattr(latent, field.name) for field in fields(latent)},
        index_heads=int(hf.require("index_n_heads", int)),
        index_size=int(hf.require("index_head_dim", int)),
        index_topk=int(hf.require("index_topk", int)),
    )
