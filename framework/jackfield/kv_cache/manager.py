"""KVCacheManager: block tables of running sequences, over one pool that all cache groups share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jackfield.interfaces import BlocksStored, CacheEvent, CacheSpec
from jackfield.kv_cache.block_pool import NULL_BLOCK, BlockPool
from jackfield.kv_cache.events import EventLog
from jackfield.kv_cache.hashing import BlockHasher


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose blocks are allocated together.

    Args:
        name: the attention group. layers: indices. specs: the cache of each layer, in the same order. window: tokens
            that stay visible, or None.
    """

    name: str
    layers: tuple[int, ...]
    specs: tuple[CacheSpec, ...]
    window: int | None = None


@dataclass(slots=True)
class Hit:
    """A prefix found in the cache: tokens that need no computing, and their blocks per group."""

    tokens: int
    blocks: list[list[int]]


class KVCacheManager:
    """Block tables by slot. All sizes are in blocks unless said otherwise.

    Args:
        groups: cache groups. block_size: tokens in a block. num_blocks: of the pool. max_slots: running sequences.
        caching: whether prefixes are looked up and published. events: whether changes of them are told.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        block_size: int,
        num_blocks: int,
        max_slots: int,
        *,
        caching: bool = True,
        events: bool = False,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self._events = EventLog() if events else None
        self.pool = BlockPool(num_blocks, self._events)
        self.caching = caching
        self.held: npt.NDArray[np.int32] = np.zeros(max_slots, dtype=np.int32)
        """[slots] entries in each slot's block tables; the same for all groups."""
        self._tables: list[list[list[int]]] = [[[] for _ in self.groups] for _ in range(max_slots)]
        self._published = [0] * max_slots
        self._freed: list[list[int]] = [[0 for _ in self.groups] for _ in range(max_slots)]

    def find_prefix(self, hasher: BlockHasher, num_tokens: int) -> Hit:
        """Return the longest cached prefix that all groups agree on. At least one of ``num_tokens`` stays to be
        computed.
        """
        limit = min(len(hasher.hashes), (num_tokens - 1) // self.block_size) if self.caching else 0
        agreed = limit
        while agreed:
            lengths = [self._group_hit(g, hasher.hashes, agreed) for g in range(len(self.groups))]
            if min(lengths) == agreed:
                break
            agreed = min(lengths)
        blocks = [self._prefix_blocks(g, hasher.hashes, agreed) for g in range(len(self.groups))]
        return Hit(agreed * self.block_size, blocks)

    def _group_hit(self, group: int, hashes: list[bytes], limit: int) -> int:
        """Return the largest length <= limit whose needed blocks are cached for one group."""
        found = [self.pool.lookup((group, h)) is not None for h in hashes[:limit]]
        window = self.groups[group].window
        if window is None:
            return found.index(False) if False in found else limit
        # A window group needs only the blocks that the next token can see.
        needed = -(-(window - 1) // self.block_size)
        run = 0
        best = 0
        for index, present in enumerate(found):
            run = run + 1 if present else 0
            if run >= min(needed, index + 1):
                best = index + 1
        return best

    def _prefix_blocks(self, group: int, hashes: list[bytes], length: int) -> list[int]:
        window = self.groups[group].window
        first = 0 if window is None else max(0, length - -(-(window - 1) // self.block_size))
        found = (self.pool.lookup((group, h)) for h in hashes[first:length])
        return [NULL_BLOCK] * first + [block for block in found if block is not None]

    def can_admit(self, hit: Hit, num_tokens: int) -> bool:
        """Return whether blocks for all of ``num_tokens`` are free, those of the hit set aside."""
        needed = 0
        for blocks in hit.blocks:
            revived = sum(1 for b in blocks if b != NULL_BLOCK and self.pool.is_free(b))
            needed += -(-num_tokens // self.block_size) - len(blocks) + revived
        return needed <= self.pool.num_free

    def admit(self, slot: int, hit: Hit) -> None:
        """Give a slot its cached prefix."""
        assert self.held[slot] == 0, "slot still holds blocks"
        for table, blocks in zip(self._tables[slot], hit.blocks, strict=True):
            self.pool.acquire(b for b in blocks if b != NULL_BLOCK)
            table[:] = blocks
        self._published[slot] = hit.tokens // self.block_size
        for g, blocks in enumerate(hit.blocks):
            self._freed[slot][g] = sum(1 for b in blocks if b == NULL_BLOCK)
        self.held[slot] = hit.tokens // self.block_size

    def grow(self, slot: int, num_tokens: int) -> list[list[int]] | None:
        """Extend a slot's tables to hold ``num_tokens`` tokens; returns the new blocks per group, or None when there
        are too few.
        """
        missing = -(-num_tokens // self.block_size) - int(self.held[slot])
        if missing <= 0:
            return [[] for _ in self.groups]
        if missing * len(self.groups) > self.pool.num_free:
            return None
        added = []
        for table in self._tables[slot]:
            blocks = self.pool.allocate(missing)
            table += blocks
            added.append(blocks)
        self.held[slot] += missing
        return added

    def publish(
        self, slot: int, hasher: BlockHasher, num_tokens: int, tokens: npt.NDArray[np.int32] | None = None
    ) -> None:
        """Make full blocks of the first ``num_tokens`` computed tokens findable. ``tokens`` are the sequence's, for
        events.
        """
        first, full = self._published[slot], min(num_tokens // self.block_size, len(hasher.hashes))
        for g, table in enumerate(self._tables[slot]):
            hashes = hasher.hashes
            held = [i for i in range(first, full) if table[i] != NULL_BLOCK]
            fresh = [i for i in held if self.pool.publish(table[i], (g, hashes[i]))]
            if self._events is not None and tokens is not None:
                for start, stop in _runs(fresh):
                    self._events.stored(self._stored(g, hashes, start, stop, tokens))
        self._published[slot] = max(first, full)

    def take_events(self) -> list[CacheEvent]:
        """Return what happened to prefixes since the last call; nothing unless events are on."""
        return self._events.take() if self._events is not None else []

    def _stored(
        self, group: int, hashes: list[bytes], start: int, stop: int, tokens: npt.NDArray[np.int32]
    ) -> BlocksStored:
        size = self.block_size
        parent = hashes[start - 1] if start else None
        ids: list[int] = tokens[start * size : stop * size].tolist()
        return BlocksStored(group, hashes[start:stop], parent, ids, size)

    def release_windows(self, slot: int, num_tokens: int) -> None:
        """Free blocks of window groups that no token after the first ``num_tokens`` can see."""
        for g, group in enumerate(self.groups):
            if group.window is None:
                continue
            visible = max(0, num_tokens - group.window + 1) // self.block_size
            table, first = self._tables[slot][g], self._freed[slot][g]
            if visible > first:
                self.pool.release(table[first:visible])
                table[first:visible] = [NULL_BLOCK] * (visible - first)
                self._freed[slot][g] = visible

    def release(self, slot: int) -> None:
        """Free all blocks of a slot, the end of the sequence first: prefixes live longer."""
        for g, table in enumerate(self._tables[slot]):
            self.pool.release(reversed(table))
            table.clear()
            self._freed[slot][g] = 0
        self.held[slot] = 0
        self._published[slot] = 0

    def table(self, slot: int, group: int) -> Sequence[int]:
        """Return the block table of a slot."""
        return self._tables[slot][group]

    def check_idle(self) -> None:
        """Raise AssertionError unless every block is back."""
        self.pool.check()
        assert self.pool.num_free == self.pool.num_usable, "blocks are still owned while nothing runs"


def _runs(places: list[int]) -> Iterator[tuple[int, int]]:
    """Yield ``[start, stop)`` of neighbours among ascending places."""
    for at, place in enumerate(places):
        if at == 0 or places[at - 1] != place - 1:
            start = place
        if at + 1 == len(places) or places[at + 1] != place + 1:
            yield start, place + 1
