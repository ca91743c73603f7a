"""Sizes of gated short convolutions, and where checkpoints keep their weights. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from jackfield.interfaces import AttentionGroup, OutputShard, WeightRule
from jackfield_models.mamba_parts import Shards, cut_rules


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvSizes:
    """A short convolution between two gates (LFM2, arXiv:2511.23404, section 2.1).

    Args:
        channels: of the convolution. width: of it. bias: whether the projections and the convolution have one.
    """

    channels: int
    width: int
    bias: bool = False
    kind: ClassVar[str] = "short_conv"

    @property
    def inputs(self) -> Shards:
        """What the input projection gives: the gates before and behind the convolution, and what it takes."""
        return tuple(OutputShard(name, self.channels) for name in ("before", "behind", "x"))

    @property
    def convolved(self) -> Shards:
        """What goes through the convolution."""
        return (OutputShard("x", self.channels),)

    def group(self, name: str, layers: tuple[int, ...]) -> AttentionGroup:
        """Return the group of such layers."""
        return AttentionGroup(
            name=name,
            kind=self.kind,
            layers=layers,
            num_heads=self.channels,
            num_kv_heads=self.channels,
            head_size=1,
            value_head_size=1,
            extra={"conv_shards": self.convolved, "conv_width": self.width},
        )

    def rules(self, source: str, target: str) -> Iterator[WeightRule]:
        """Return where the weights of a layer go; ``source`` and ``target`` are the mixer's paths."""
        yield from cut_rules(f"{source}.in_proj", f"{target}.in", self.inputs)
        yield WeightRule(f"{source}.conv", f"{target}.conv")
        yield WeightRule(f"{source}.out_proj", f"{target}.out")
