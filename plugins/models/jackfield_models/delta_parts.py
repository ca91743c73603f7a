"""Sizes of gated delta networks, and where checkpoints keep their weights. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from jackfield.interfaces import AttentionGroup, ConfigReader, OutputShard, RowSlice, WeightRule

Shards = tuple[OutputShard, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaSizes:
    """A gated delta network (arXiv:2412.06464).

    Args:
        key_heads: heads of queries and keys. heads: of values, a multiple of them. key, value: sizes of a head. width:
            of the convolution. eps: of the norm. fused: the checkpoint has two input projections, rows of each key head
            together (Qwen3-Next), not one for each use.
            reach: largest strength with which a token is written.
    """

    key_heads: int
    heads: int
    key: int
    value: int
    width: int
    eps: float = 1e-6
    fused: bool = True
    reach: float = 1.0
    kind: ClassVar[str] = "gdn"

    @property
    def convolved(self) -> Shards:
        """What goes through the convolution."""
        size = self.key_heads * self.key
        return (OutputShard("q", size, self.key), OutputShard("k", size, self.key), self.values)

    @property
    def values(self) -> OutputShard:
        """The value heads."""
        return OutputShard("v", self.heads * self.value, self.value)

    @property
    def inputs(self) -> Shards:
        """What the input projection gives."""
        return (*self.convolved, OutputShard("z", self.heads * self.value, self.value))

    @property
    def rates(self) -> Shards:
        """What the projection of strengths and decays gives: one number for each head."""
        return (OutputShard("b", self.heads), OutputShard("a", self.heads))

    def group(self, name: str, layers: tuple[int, ...]) -> AttentionGroup:
        """Return the group of such layers."""
        return AttentionGroup(
            name=name,
            kind=self.kind,
            layers=layers,
            num_heads=self.heads,
            num_kv_heads=self.key_heads,
            head_size=self.key,
            value_head_size=self.value,
            extra={"conv_shards": self.convolved, "conv_width": self.width},
        )

    def rules(self, source: str, target: str) -> Iterator[WeightRule]:
        """Return where the weights of a layer go; ``source`` and ``target`` are the mixer's paths."""
        if self.fused:
            yield from self._by_head(f"{source}.in_proj_qkvz", f"{target}.in", self.inputs)
            yield from self._by_head(f"{source}.in_proj_ba", f"{target}.rates", self.rates)
        else:
            yield from self._apart(source, target)
        for name, part in (("conv1d", "conv"), ("norm", "norm"), ("out_proj", "out")):
            yield WeightRule(f"{source}.{name}", f"{target}.{part}")
        for name, part in (("A_log", "a_log"), ("dt_bias", "dt_bias")):
            yield WeightRule(f"{source}.{name}", f"{target}.{part}")

    def _by_head(self, source: str, target: str, shards: Shards) -> Iterator[WeightRule]:
        sizes = [shard.size // self.key_heads for shard in shards]
        start = 0
        for shard, size in zip(shards, sizes, strict=True):
            cut = RowSlice(start, start + size, sum(sizes), self.key_heads)
            yield WeightRule(source, target, shard.name, cut=cut)
            start += size

    def _apart(self, source: str, target: str) -> Iterator[WeightRule]:
        total, start = sum(shard.size for shard in self.convolved), 0
        for shard in self.convolved:
            cut = RowSlice(start, start + shard.size, total)
            yield WeightRule(f"{source}.in_proj_qkv", f"{target}.in", shard.name, cut=cut)
            start += shard.size
        yield WeightRule(f"{source}.in_proj_z", f"{target}.in", "z")
        for name in ("b", "a"):
            yield WeightRule(f"{source}.in_proj_{name}", f"{target}.rates", name)


def read_delta(hf: ConfigReader, eps: float, *, fused: bool) -> DeltaSizes:
    """Return the sizes from Qwen's keys."""
    return DeltaSizes(
        key_heads=int(hf.get("linear_num_key_heads", 16)),
        heads=int(hf.get("linear_num_value_heads", 32)),
        key=int(hf.get("linear_key_head_dim", 128)),
        value=int(hf.get("linear_value_head_dim", 128)),
        width=int(hf.get("linear_conv_kernel_dim", 4)),
        eps=eps,
        fused=fused,
    )
