"""Weight maps: where the tensors of a checkpoint go, as data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowOrder:
    """How rows of a checkpoint matrix are ordered, where that differs from the module's order.

    ``interleaved_pairs``: inside each of ``units`` heads, rotary pairs lie next to each other (2i, 2i + 1) as GGUF
    stores Llama's q and k, and as GPT-J, Cohere and GLM are trained; modules want halves (i, i + D/2). ``size`` is how
    many rows of a head are paired, from its row ``start`` on; 0 for all that follow.
    """

    kind: str
    units: int
    size: int = 0
    start: int = 0


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Which rows of a checkpoint matrix a module takes, where the checkpoint has fused what the engine keeps apart.

    The matrix has ``groups`` equal parts of ``total`` rows; of each part the rows ``start`` to ``stop`` are taken.
    ``RowSlice(0, 64, 96)`` takes the first 64 of 96 rows; with ``groups`` the number of cache heads it undoes a fused
    qkv that is stored head by head.
    """

    start: int
    stop: int
    total: int
    groups: int = 1


@dataclass(frozen=True, slots=True)
class WeightRule:
    """Where the tensors of one checkpoint module go.

    Args:
        source: checkpoint module (``model.layers.0.self_attn.q_proj``) or a full tensor name when the last part is no
            parameter suffix.
        target: module path in the built model (``layers.0.attn.qkv``).
        shard: shard of a fused layer, or ``""``.
        rows: order of the rows in the checkpoint, or None when it is the module's.
        expert: index of the expert, for a layer of experts; None where the source has all of them, in front.
        optional: the checkpoint may lack it.
        cut: which rows of the source are meant, or None for all of them.
        transposed: the checkpoint has its matrix as [inputs, outputs].
        suffix: which parameter it is, where ``source`` is a full tensor name.
        unit_rows: each row is scaled to length 1.
    """

    source: str
    target: str
    shard: str = ""
    rows: RowOrder | None = None
    expert: int | None = None
    optional: bool = False
    cut: RowSlice | None = None
    transposed: bool = False
    suffix: str = "weight"
    unit_rows: bool = False


@dataclass(frozen=True, slots=True)
class Scaling:
    """A place where factors can be moved: if the outputs of one module are divided by positive factors, feature by
    feature, and the inputs of those that take them are multiplied by the same, the model computes what it did.

    Args:
        before: module path of a norm or a linear layer. after: paths of all linear layers that take what it gives;
            nothing else may. shard: which outputs of ``before`` are meant, where it is a fused layer. offset: added to
            the weight of a norm before it is used.
    """

    before: str
    after: tuple[str, ...]
    shard: str = ""
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class WeightMap:
    """All rules of a checkpoint, and patterns (regular expressions on full tensor names) of tensors that are known
    and not needed. ``droppable`` is a start of the sources' names that a checkpoint may leave out (``transformer.``,
    where it was saved without its head). ``scalings``: where factors can be moved, as far as that is known.
    """

    rules: tuple[WeightRule, ...]
    ignore: tuple[str, ...] = ()
    droppable: str = ""
    scalings: tuple[Scaling, ...] = ()

    def named(self) -> Iterator[tuple[str, WeightRule]]:
        """Yield each rule with every name that its source may have."""
        for rule in self.rules:
            for name in dict.fromkeys((rule.source, rule.source.removeprefix(self.droppable))):
                yield name, rule


def unique_targets(rules: Iterable[WeightRule]) -> list[str]:
    """Return targets (with shard and expert) that more than one rule writes; empty for a sound map."""
    seen: set[tuple[str, str, int | None, str]] = set()
    twice = []
    for rule in rules:
        key = (rule.target, rule.shard, rule.expert, rule.suffix)
        if key in seen:
            twice.append(f"{rule.target}[{rule.shard}]" if rule.shard else rule.target)
        seen.add(key)
    return twice
