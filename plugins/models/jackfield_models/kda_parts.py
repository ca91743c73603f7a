"""Sizes of Kimi Delta Attention, and where checkpoints keep its weights. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from jackfield.interfaces import AttentionGroup, OutputShard, WeightRule

Shards = tuple[OutputShard, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KdaSizes:
    """Kimi Delta Attention (arXiv:2510.26692): the delta rule with a decay for each feature of a key.

    Args:
        heads: of queries, keys and values. size: of a head. width: of the convolution. eps: of the norm. low_rank: the
            projections to decays and to the output's gate go through ``size`` features. bound: least logarithm of a
            decay, or None for none. log_shape: of the logarithms of decay rates in a checkpoint. out: name of the
            output's projection.
    """

    heads: int
    size: int
    width: int
    eps: float = 1e-5
    low_rank: bool = True
    bound: float | None = None
    log_shape: tuple[int, ...] = ()
    out: str = "o_proj"
    kind: ClassVar[str] = "kda"

    @property
    def values(self) -> OutputShard:
        """Features of all heads."""
        return OutputShard("v", self.heads * self.size, self.size)

    @property
    def convolved(self) -> Shards:
        """What goes through the convolution."""
        return tuple(OutputShard(name, self.heads * self.size, self.size) for name in "qkv")

    def group(self, name: str, layers: tuple[int, ...]) -> AttentionGroup:
        """Return the group of such layers."""
        return AttentionGroup(
            name=name,
            kind=self.kind,
            layers=layers,
            num_heads=self.heads,
            num_kv_heads=self.heads,
            head_size=self.size,
            value_head_size=self.size,
            extra={"conv_shards": self.convolved, "conv_width": self.width},
        )

    def rules(self, source: str, target: str) -> Iterator[WeightRule]:
        """Return where the weights of a layer go; ``source`` and ``target`` are the mixer's paths."""
        yield WeightRule(f"{source}.conv1d", f"{target}.conv")
        for shard in "qkv":
            yield WeightRule(f"{source}.{shard}_proj", f"{target}.in", shard)
            yield WeightRule(f"{source}.{shard}_conv1d", f"{target}.conv", shard)
        parts = {"b_proj": "rates", "o_norm": "norm", self.out: "out", "A_log": "a_log", "dt_bias": "dt_bias"}
        if self.low_rank:
            yield WeightRule(f"{source}.f_a_proj", f"{target}.narrow", "f")
            yield WeightRule(f"{source}.g_a_proj", f"{target}.narrow", "g")
            parts |= {"f_b_proj": "decay", "g_b_proj": "gate"}
        else:
            parts |= {"f_proj": "decay", "g_proj": "gate"}
        for name, part in parts.items():
            yield WeightRule(f"{source}.{name}", f"{target}.{part}")
