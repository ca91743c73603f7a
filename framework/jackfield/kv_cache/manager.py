"""KVCacheManager: block tables of running sequences, over one pool that all cache groups share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jackfield.interfaces import BlocksStored, CacheEvent
from jackfield.kv_cache.block_pool import NULL_BLOCK, BlockPool
from jackfield.kv_cache.events import EventLog
from jackfield.kv_cache.groups import CacheGroup, Retention
from jackfield.kv_cache.hashing import BlockHasher


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
        step_tokens: most tokens of a sequence that are computed before windows are freed.
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
        step_tokens: int = 1 << 30,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self._events = EventLog() if events else None
        self.pool = BlockPool(num_blocks, self._events)
        self.caching = caching
        self._step_tokens = step_tokens
        self._aligned = caching and any(group.is_state for group in self.groups)
        self.held: npt.NDArray[np.int32] = np.zeros(max_slots, dtype=np.int32)
        """[slots] entries in each slot's block tables; the same for all groups, but those with states."""
        self._states: npt.NDArray[np.int32] = np.zeros(max_slots, dtype=np.int32)
        """[slots] entries in the tables of groups with states."""
        self._stateful = any(group.is_state for group in self.groups)
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
        needs = self.groups[group]
        if needs.is_cross:
            return limit
        run = best = 0
        for index, chain in enumerate(hashes[:limit]):
            run = run + 1 if self.pool.lookup((group, chain)) is not None else 0
            length = index + 1
            if run < length and needs.keeps is Retention.FULL:
                break
            if run >= length - needs.first_needed(length * self.block_size, self.block_size):
                best = length
        return best

    def _prefix_blocks(self, group: int, hashes: list[bytes], length: int) -> list[int]:
        needs = self.groups[group]
        if needs.is_cross:
            return []
        first = min(length, needs.first_needed(length * self.block_size, self.block_size))
        found = (self.pool.lookup((group, h)) for h in hashes[first:length])
        return [NULL_BLOCK] * first + [block for block in found if block is not None]

    def can_admit(self, hit: Hit, num_tokens: int, encoder_tokens: int = 0) -> bool:
        """Return whether blocks for all of ``num_tokens`` are free, those of the hit set aside.

        Args:
            encoder_tokens: length of the encoder's output that cross attention keeps.
        """
        needed = -(-encoder_tokens // self.block_size) * sum(g.is_cross for g in self.groups)
        for group, blocks in zip(self.groups, hit.blocks, strict=True):
            owned = [b for b in blocks if b != NULL_BLOCK]
            most = group.most_blocks(num_tokens, self.block_size, self._step_tokens)
            needed += max(0, most - len(owned)) + sum(self.pool.is_free(b) for b in owned)
        return needed <= self.pool.num_free

    def admit(self, slot: int, hit: Hit, encoder_tokens: int = 0) -> None:
        """Give a slot its cached prefix, and blocks for an encoder's output to groups that keep one."""
        assert self.held[slot] == 0, "slot still holds blocks"
        for g, (table, blocks) in enumerate(zip(self._tables[slot], hit.blocks, strict=True)):
            self.pool.acquire(b for b in blocks if b != NULL_BLOCK)
            table[:] = blocks
            if self.groups[g].is_cross:
                table[:] = self.pool.allocate(-(-encoder_tokens // self.block_size))
            self._freed[slot][g] = sum(1 for b in blocks if b == NULL_BLOCK)
        self._published[slot] = hit.tokens // self.block_size
        self.held[slot] = self._states[slot] = hit.tokens // self.block_size

    def short(
        self, slots: npt.NDArray[np.int32], num_tokens: npt.NDArray[np.int32], ahead: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.bool_]:
        """Return [B] whether slots must :meth:`grow` for so many tokens, and so many behind them."""
        short: npt.NDArray[np.bool_] = (num_tokens + ahead - 1) // self.block_size >= self.held[slots]
        if self._stateful:
            short |= (num_tokens - 1) // self.block_size >= self._states[slots]
        return short

    def has_room(self, slot: int, num_tokens: int, ahead: int = 0) -> bool:
        """Return whether :meth:`grow` would find blocks."""
        return sum(map(sum, self._places(slot, num_tokens, ahead))) <= self.pool.num_free

    def _places(self, slot: int, num_tokens: int, ahead: int) -> list[list[bool]]:
        """Return per group which of the entries that a slot's tables lack get a page of their own."""
        wanted, states = -(-(num_tokens + ahead) // self.block_size), -(-num_tokens // self.block_size)
        held, stated = int(self.held[slot]), int(self._states[slot])
        return [g.new_blocks(stated, states) if g.is_state else g.new_blocks(held, wanted) for g in self.groups]

    def grow(self, slot: int, num_tokens: int, ahead: int = 0) -> list[list[int]] | None:
        """Extend a slot's tables to hold the ``num_tokens`` tokens that are computed when the next step ends, and
        ``ahead`` more: those of a draft model, of which there are no states. The state behind a step lies in the block
        that the step ends in. Returns the new entries per group, or None when there are too few blocks.
        """
        places = self._places(slot, num_tokens, ahead)
        if sum(map(sum, places)) > self.pool.num_free:
            return None
        added = []
        for table, owns in zip(self._tables[slot], places, strict=True):
            fresh = iter(self.pool.allocate(sum(owns)))
            blocks = [next(fresh) if own else NULL_BLOCK for own in owns]
            table += blocks
            added.append(blocks)
        self.held[slot] = max(self.held[slot], -(-(num_tokens + ahead) // self.block_size))
        self._states[slot] = max(self._states[slot], -(-num_tokens // self.block_size))
        return added

    def cut(self, computed: int, count: int) -> int:
        """Return how many of ``count`` tokens behind ``computed`` ones may be computed in one step.

        A recurrent state is a snapshot of a prefix only where a step ends with a block, so steps do not run past the
        end of a block that they enter in its middle, and end with a block where they pass one.
        """
        if not self._aligned:
            return count
        size = self.block_size
        if inside := computed % size:
            return min(count, size - inside)
        return count if count < size else count // size * size

    def publish(
        self, slot: int, hasher: BlockHasher, num_tokens: int, tokens: npt.NDArray[np.int32] | None = None
    ) -> None:
        """Make full blocks of the first ``num_tokens`` computed tokens findable. ``tokens`` are the sequence's, for
        events.
        """
        first, full = self._published[slot], min(num_tokens // self.block_size, len(hasher.hashes))
        for g, table in enumerate(self._tables[slot]):
            if self.groups[g].is_cross:
                continue
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
        """Free blocks that no token after the first ``num_tokens`` needs."""
        for g, group in enumerate(self.groups):
            table, first = self._tables[slot][g], self._freed[slot][g]
            needed = min(len(table), group.first_needed(num_tokens, self.block_size))
            if needed > first:
                self.pool.release(table[first:needed])
                table[first:needed] = [NULL_BLOCK] * (needed - first)
                self._freed[slot][g] = needed

    def release(self, slot: int) -> None:
        """Free all blocks of a slot, the end of the sequence first: prefixes live longer."""
        for g, table in enumerate(self._tables[slot]):
            self.pool.release(reversed(table))
            table.clear()
            self._freed[slot][g] = 0
        self.held[slot] = self._states[slot] = 0
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
