"""KVCacheManager against brute force: which prefixes are cached, and what each group needs of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jackfield.kv_cache import BlockHasher, CacheGroup, KVCacheManager
from jackfield.kv_cache.block_pool import NULL_BLOCK

SLOTS = 4
windows_of = st.lists(st.one_of(st.none(), st.integers(1, 14)), min_size=1, max_size=3)


def groups_of(windows: list[int | None]) -> list[CacheGroup]:
    return [CacheGroup(f"g{i}", (i,), (), window) for i, window in enumerate(windows)]


def hasher_of(tokens: list[int], size: int) -> BlockHasher:
    hasher = BlockHasher(size)
    hasher.extend(np.array(tokens, dtype=np.int32))
    return hasher


def needed_blocks(length: int, window: int | None, size: int) -> list[int]:
    """Return the blocks of a prefix of ``length`` tokens that the token behind it sees."""
    first = 0 if window is None else max(0, length - window + 1)
    return sorted({position // size for position in range(first, length)})


class ManagerMachine(RuleBasedStateMachine):
    """Sequences come, compute, publish, free their windows, and go; what is findable is kept as a dictionary."""

    @initialize(windows=windows_of, size=st.integers(1, 5), blocks=st.integers(4, 60))
    def start(self, windows: list[int | None], size: int, blocks: int) -> None:
        self.size, self.windows = size, windows
        self.manager = KVCacheManager(groups_of(windows), size, blocks, SLOTS)
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}
        """(group, block) to the prefix of tokens that it completes."""

    def cached(self, group: int, prefix: tuple[int, ...]) -> bool:
        return any(g == group and held == prefix for (g, _), held in self.content.items())

    def longest(self, tokens: list[int]) -> int:
        """Return the longest prefix whose needed blocks are cached for every group, by trying all."""
        for length in range((len(tokens) - 1) // self.size * self.size, 0, -self.size):
            if all(
                self.cached(g, tuple(tokens[: (index + 1) * self.size]))
                for g, window in enumerate(self.windows)
                for index in needed_blocks(length, window, self.size)
            ):
                return length
        return 0

    @precondition(lambda self: len(self.tokens) < SLOTS)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24))
    def admit(self, tokens: list[int]) -> None:
        hasher = hasher_of(tokens, self.size)
        hit = self.manager.find_prefix(hasher, len(tokens))
        assert hit.tokens == self.longest(tokens)
        for g, window in enumerate(self.windows):
            needed = needed_blocks(hit.tokens, window, self.size)
            for index, block in enumerate(hit.blocks[g]):
                if index in needed:
                    assert self.content[g, block] == tuple(tokens[: (index + 1) * self.size])
        if not self.manager.can_admit(hit, len(tokens)):
            return
        slot = next(s for s in range(SLOTS) if s not in self.tokens)
        self.manager.admit(slot, hit)
        self.tokens[slot], self.computed[slot] = tokens, hit.tokens

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.integers(1, 9))
    def compute(self, data: st.DataObject, more: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        target = min(len(self.tokens[slot]), self.computed[slot] + more)
        free = self.manager.pool.num_free
        missing = max(0, -(-target // self.size) - int(self.manager.held[slot])) * len(self.windows)
        added = self.manager.grow(slot, target)
        assert (added is None) == (missing > free)
        if added is None:
            return
        for blocks in added:
            for block in blocks:
                for group in range(len(self.windows)):
                    self.content.pop((group, block), None)
        # Blocks are published once, when they become full: a copy of a prefix that was findable then stays unpublished.
        first, self.computed[slot] = self.computed[slot] // self.size, target
        self.manager.publish(slot, hasher_of(self.tokens[slot], self.size), target)
        for g in range(len(self.windows)):
            for index in range(first, target // self.size):
                prefix = tuple(self.tokens[slot][: (index + 1) * self.size])
                block = self.manager.table(slot, g)[index]
                if block != NULL_BLOCK and not self.cached(g, prefix):
                    self.content[g, block] = prefix
        self.manager.release_windows(slot, target)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        self.manager.release(slot)
        del self.tokens[slot], self.computed[slot]

    @invariant()
    def tables_hold_what_is_needed(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.pool.check()
        for slot, computed in self.computed.items():
            for g, window in enumerate(self.windows):
                table = self.manager.table(slot, g)
                assert len(table) == int(self.manager.held[slot]) >= -(-computed // self.size)
                kept = {i for i, block in enumerate(table) if block != NULL_BLOCK}
                assert kept >= set(needed_blocks(computed, window, self.size))
                if window is not None and computed % self.size == 0:
                    behind = max(0, computed - window + 1) // self.size
                    assert not kept & set(range(behind)), "blocks behind the window are free"
        if not self.tokens:
            self.manager.check_idle()


ManagerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestManager = ManagerMachine.TestCase


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 8), length=st.integers(1, 40))
def test_the_last_token_is_always_left_to_compute(size: int, length: int) -> None:
    manager = KVCacheManager(groups_of([None]), size, 64, 1)
    tokens = list(range(length))
    manager.admit(0, manager.find_prefix(hasher_of(tokens, size), length))
    assert manager.grow(0, length) is not None
    manager.publish(0, hasher_of(tokens, size), length)
    hit = manager.find_prefix(hasher_of(tokens, size), length)
    assert hit.tokens == (length - 1) // size * size < length


def test_nothing_is_found_where_caching_is_off() -> None:
    manager = KVCacheManager(groups_of([None]), 2, 16, 2, caching=False)
    tokens = [1, 2, 3, 4, 5]
    manager.admit(0, manager.find_prefix(hasher_of(tokens, 2), 5))
    manager.grow(0, 5)
    manager.publish(0, hasher_of(tokens, 2), 5)
    assert manager.find_prefix(hasher_of(tokens, 2), 5).tokens == 0


def test_admission_counts_what_a_hit_takes_out_of_the_free_blocks() -> None:
    manager = KVCacheManager(groups_of([None]), 2, 5, 2)
    tokens = [1, 2, 3, 4, 5]
    manager.admit(0, manager.find_prefix(hasher_of(tokens, 2), 5))
    manager.grow(0, 5)
    manager.publish(0, hasher_of(tokens, 2), 5)
    manager.release(0)
    hit = manager.find_prefix(hasher_of(tokens, 2), 5)
    assert hit.tokens == 4
    assert manager.can_admit(hit, 8), "two blocks are revived and two are free"
    assert not manager.can_admit(hit, 9)


def test_a_slot_must_be_empty_to_be_taken() -> None:
    manager = KVCacheManager(groups_of([None]), 2, 8, 1)
    hit = manager.find_prefix(hasher_of([1], 2), 1)
    manager.admit(0, hit)
    manager.grow(0, 2)
    with pytest.raises(AssertionError, match="slot still holds blocks"):
        manager.admit(0, hit)
    with pytest.raises(AssertionError, match="blocks are still owned"):
        manager.check_idle()
