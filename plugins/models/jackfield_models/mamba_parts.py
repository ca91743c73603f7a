"""Sizes of Mamba layers, the groups they form, and where checkpoints keep their weights. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from jackfield.interfaces import AttentionGroup, OutputShard, RowSlice, WeightRule

Shards = tuple[OutputShard, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba1Sizes:
    """A selective state space (arXiv:2312.00752).

    Args:
        inner: channels. state: states of a channel. rank: of the step sizes. width: of the convolution. bias: whether
            the projections of input and output have one, conv_bias: whether the convolution has. norms: how step sizes,
            B and C are normalized: not at all (``""``), or with weights (``weights``) or without (``plain``). eps: of
            these norms.
    """

    inner: int
    state: int
    rank: int
    width: int
    bias: bool = False
    conv_bias: bool = True
    norms: str = ""
    eps: float = 1e-6
    kind: ClassVar[str] = "mamba1"

    @property
    def inputs(self) -> Shards:
        """What the input projection gives."""
        return (OutputShard("x", self.inner), OutputShard("gate", self.inner))

    @property
    def convolved(self) -> Shards:
        """What goes through the convolution."""
        return (OutputShard("x", self.inner),)

    def group(self, name: str, layers: tuple[int, ...]) -> AttentionGroup:
        """Return the group of such layers."""
        return AttentionGroup(
            name=name,
            kind=self.kind,
            layers=layers,
            num_heads=self.inner,
            num_kv_heads=self.inner,
            head_size=self.state,
            value_head_size=1,
            extra={"conv_shards": self.convolved, "conv_width": self.width},
        )

    def rules(self, source: str, target: str) -> Iterator[WeightRule]:
        """Return where the weights of a layer go; ``source`` and ``target`` are the mixer's paths."""
        yield from cut_rules(f"{source}.in_proj", f"{target}.in", self.inputs)
        yield WeightRule(f"{source}.conv1d", f"{target}.conv")
        for name, part in (("x_proj", "select"), ("dt_proj", "dt"), ("out_proj", "out")):
            yield WeightRule(f"{source}.{name}", f"{target}.{part}")
        yield WeightRule(f"{source}.A_log", f"{target}.a_log")
        yield WeightRule(f"{source}.D", f"{target}.d")
        if self.norms == "weights":
            for name in ("dt", "b", "c"):
                yield WeightRule(f"{source}.{name}_layernorm", f"{target}.{name}_norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Sizes:
    """A state space with one decay for each head (arXiv:2405.21060).

    Args:
        heads, head_size: of the values. groups: heads of one group share B and C. state: size of B and C. width: of the
            convolution. bias, conv_bias: as in Mamba1Sizes. dt_limit: bounds of the step sizes. norm_size: features
            that the gated norm takes together, 0 for all. eps: of it. gate_first: the gate comes before that norm.
            norm: whether there is one. out_bias: whether the output's projection has a bias, if not as ``bias`` says.
            factors: on gate, values, B, C and step sizes, or () for none.
    """

    heads: int
    head_size: int
    groups: int
    state: int
    width: int
    bias: bool = False
    conv_bias: bool = True
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    norm_size: int = 0
    eps: float = 1e-5
    gate_first: bool = True
    norm: bool = True
    out_bias: bool | None = None
    factors: tuple[float, ...] = ()
    kind: ClassVar[str] = "mamba2"

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_size

    @property
    def values(self) -> OutputShard:
        """The heads."""
        return OutputShard("x", self.inner, self.head_size)

    @property
    def convolved(self) -> Shards:
        """What goes through the convolution."""
        b, c = (OutputShard(n, self.groups * self.state, self.state, may_replicate=True) for n in ("b", "c"))
        return (self.values, b, c)

    @property
    def inputs(self) -> Shards:
        """What the input projection gives."""
        gate = OutputShard("gate", self.inner, self.head_size)
        return (gate, *self.convolved, self.steps)

    @property
    def steps(self) -> OutputShard:
        """One number for each head."""
        return OutputShard("dt", self.heads)

    def group(self, name: str, layers: tuple[int, ...]) -> AttentionGroup:
        """Return the group of such layers."""
        extra = {"conv_shards": self.convolved, "conv_width": self.width, "dt_limit": self.dt_limit}
        return AttentionGroup(
            name=name,
            kind=self.kind,
            layers=layers,
            num_heads=self.heads,
            num_kv_heads=self.groups,
            head_size=self.state,
            value_head_size=self.head_size,
            extra=extra,
        )

    def rules(self, source: str, target: str) -> Iterator[WeightRule]:
        """Return where the weights of a layer go; ``source`` and ``target`` are the mixer's paths."""
        yield from cut_rules(f"{source}.in_proj", f"{target}.in", self.inputs)
        yield WeightRule(f"{source}.conv1d", f"{target}.conv")
        yield WeightRule(f"{source}.out_proj", f"{target}.out")
        for name, part in (("A_log", "a_log"), ("D", "d"), ("dt_bias", "dt_bias")):
            yield WeightRule(f"{source}.{name}", f"{target}.{part}")
        if self.norm:
            yield WeightRule(f"{source}.norm", f"{target}.norm")


def cut_rules(source: str, target: str, shards: Shards) -> Iterator[WeightRule]:
    """Return rules of a matrix that a checkpoint has in one piece: its rows are those of ``shards``, in their order."""
    total, start = sum(shard.size for shard in shards), 0
    for shard in shards:
        yield WeightRule(source, target, shard.name, cut=RowSlice(start, start + shard.size, total))
        start += shard.size
