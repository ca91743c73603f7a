"""What a layer keeps between steps, described as data so that one memory plan can hold all layers' needs.

A *page* is the unit of allocation. A spec ``per="block"`` has one page per block of tokens; ``per="sequence"`` has
one page per running sequence
(recurrent states). Backends list acceptable specs in order of liking; the core intersects the lists of composites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

BLOCK = -1
"""Stands for the block size (tokens in a block) inside :attr:`Plane.shape`."""

DTYPE_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True, slots=True)
class Plane:
    """One named tensor of a cache: keys, values, scales, a latent, a convolution state.

    Args:
        name: ``k``, ``v``, ``k_scale``, ``latent``, ``conv``, ``ssm`` ...
        dtype: storage type, in torch's words.
        shape: logical shape of one page; :data:`BLOCK` stands for the block size. Sizes are those of this rank.
        order: memory order of ``(page, *shape)``, outermost first, as a permutation; empty means row-major. The page
            index may lie inside, as in
            head-major layouts.
        shard_dim: index into ``shape`` of the dimension that tensor parallelism cuts, or ``None`` when every rank
            holds the whole plane.

    >>> Plane("k", "bfloat16", (BLOCK, 8, 128)).page_bytes(16)
    32768
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    shard_dim: int | None = None

    def page_shape(self, block_size: int) -> tuple[int, ...]:
        """Return the shape of one page with the block size filled in."""
        return tuple(block_size if size == BLOCK else size for size in self.shape)

    def page_bytes(self, block_size: int) -> int:
        """Return bytes of one page."""
        return prod(self.page_shape(block_size)) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Which block sizes a backend can work with: the multiples of ``multiple_of`` between ``smallest`` and
    ``largest``, or just ``only``.

    >>> BlockSizes(multiple_of=16).allows(48), BlockSizes(only=(64,)).allows(16)
    (True, False)
    """

    multiple_of: int = 1
    smallest: int = 1
    largest: int = 1 << 30
    only: tuple[int, ...] = ()

    def allows(self, size: int) -> bool:
        """Return whether ``size`` can be used."""
        if self.only:
            return size in self.only
        return self.smallest <= size <= self.largest and size % self.multiple_of == 0


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The cache of one layer.

    Args:
        planes: its tensors. An empty tuple: the layer keeps nothing.
        per: ``block`` or ``sequence``.
        block_sizes: allowed block sizes; of no meaning for ``per="sequence"``.
        window: tokens that stay visible (sliding or chunked windows): blocks wholly outside may be freed. ``None``:
            all.
        state_slots_per_draft: for recurrent state: how many more pages a sequence needs for each draft token (states
            to roll back to).

    >>> spec = CacheSpec((Plane("k", "float32", (BLOCK, 2, 64)), Plane("v", "float32", (BLOCK, 2, 64))))
    >>> spec.page_bytes(16)
    16384
    """

    planes: tuple[Plane, ...]
    per: str = "block"
    block_sizes: BlockSizes = field(default_factory=BlockSizes)
    window: int | None = None
    state_slots_per_draft: int = 0

    def page_bytes(self, block_size: int) -> int:
        """Return bytes of one page over all planes."""
        return sum(plane.page_bytes(block_size) for plane in self.planes)

    def same_storage(self, other: CacheSpec) -> bool:
        """Return whether two backends could read and write one allocation."""
        return self.planes == other.planes and self.per == other.per


def intersect(first: Sequence[CacheSpec], second: Sequence[CacheSpec]) -> CacheSpec | None:
    """Return the first spec of ``first`` that ``second`` stores alike, or ``None``."""
    for spec in first:
        if any(spec.same_storage(other) for other in second):
            return spec
    return None
