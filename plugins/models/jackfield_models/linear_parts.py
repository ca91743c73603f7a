"""Sizes of lightning attention, and where checkpoints keep its weights. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from jackfield.interfaces import AttentionGroup, OutputShard, RowSlice, WeightRule
from jackfield_models.mamba_parts import Shards


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSizes:
    """Lightning attention (arXiv:2401.04658): linear attention whose heads forget at fixed rates.

    Args:
        heads: of queries, keys and values. size: of a head. layers: of the model, which rates depend on. eps: of the
            norm. activation: of queries, keys and values.
    """

    heads: int
    size: int
    layers: int
    eps: float = 1e-6
    activation: str = "silu"
    kind: ClassVar[str] = "linear"

    @property
    def inputs(self) -> Shards:
        """Queries, keys and values."""
        return tuple(OutputShard(name, self.heads * self.size, self.size) for name in "qkv")

    def decays(self, layer: int) -> list[float]:
        """Return the logarithm of what each head keeps from one token to the next: slopes of ALiBi, the smaller the
        higher the layer (MiniMax-01, arXiv:2501.08313, section 2.2).
        """
        part = 1.0 - layer / (self.layers - 1 + 1e-5) + 1e-5
        return [-(2.0 ** (-8.0 * (head + 1) / self.heads)) * part for head in range(self.heads)]

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
        )

    def rules(self, source: str, target: str) -> Iterator[WeightRule]:
        """Return where the weights of a layer go; ``source`` and ``target`` are the mixer's paths."""
        size = self.size
        for place, shard in enumerate("qkv"):
            cut = RowSlice(place * size, (place + 1) * size, 3 * size, self.heads)
            yield WeightRule(f"{source}.qkv_proj", f"{target}.in", shard, cut=cut)
        for name, part in (("norm", "norm"), ("output_gate", "gate"), ("out_proj", "out")):
            yield WeightRule(f"{source}.{name}", f"{target}.{part}")
