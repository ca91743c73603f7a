"""Sharding as data: how a weight or a cache is cut when several ranks share a layer.

Every parallel layer, quantized parameter and cache plane carries these records, so that tensor, expert and context
parallelism are settings and not
code paths. A *unit* is the smallest piece that may not be cut (one head, one quantization group).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Parallel(Enum):
    """How a linear layer is cut across the tensor-parallel ranks."""

    REPLICATED = "replicated"
    COLUMN = "column"
    """Output rows are cut; each rank computes its own outputs."""
    ROW = "row"
    """Input columns are cut; partial results are summed over the ranks."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One rank among ``size`` ranks of a parallel group."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class OutputShard:
    """One of the checkpoint matrices that a fused linear layer stacks along its output dimension.

    Args:
        name: what the weight map calls it (``q``, ``gate``); ``""`` for a layer of a single matrix.
        size: rows in the checkpoint.
        unit: rows that stay together (head size for q, k and v; 1 for gate and up).
        may_replicate: when there are fewer units than ranks, neighbouring ranks hold the same unit (KV heads of
            grouped-query attention).

    >>> OutputShard("k", 2 * 64, unit=64, may_replicate=True).slice(RankInfo(3, 4))
    (64, 128)
    >>> OutputShard("q", 8 * 64, unit=64).slice(RankInfo(1, 4))
    (128, 256)
    """

    name: str
    size: int
    unit: int = 1
    may_replicate: bool = False

    def slice(self, rank: RankInfo) -> tuple[int, int]:
        """Return the ``[start, stop)`` rows of the checkpoint matrix that ``rank`` holds.

        Raises:
            ValueError: the units cannot be divided among the ranks.
        """
        units = self.size // self.unit
        if units % rank.size == 0:
            share = units // rank.size * self.unit
            return rank.rank * share, (rank.rank + 1) * share
        if self.may_replicate and rank.size % units == 0:
            unit = rank.rank * units // rank.size
            return unit * self.unit, (unit + 1) * self.unit
        raise ValueError(f"{units} units of '{self.name}' cannot be divided among {rank.size} ranks")

    def local_size(self, rank: RankInfo) -> int:
        """Return how many rows ``rank`` holds."""
        start, stop = self.slice(rank)
        return stop - start


def even_slice(size: int, rank: RankInfo, unit: int = 1) -> tuple[int, int]:
    """Return the ``[start, stop)`` part of ``size`` that ``rank`` holds; raises ValueError when units do not divide
    evenly.
    """
    if size % (unit * rank.size):
        raise ValueError(f"{size} cannot be divided into {rank.size} parts in units of {unit}")
    share = size // rank.size
    return rank.rank * share, (rank.rank + 1) * share
