"""KVCacheManager against brute force: which prefixes are cached, and what each group needs of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jackfield.kv_cache import BlockHasher, CacheGroup, KVCacheManager, Retention
from jackfield.kv_cache.block_pool import NULL_BLOCK

SLOTS = 4
Kind = tuple[Retention, int | None]
FULL: Kind = (Retention.FULL, None)
kinds = st.one_of(
    st.just(FULL),
    st.just((Retention.STATE, None)),
    st.tuples(st.sampled_from([Retention.SLIDING, Retention.CHUNKED]), st.integers(1, 14)),
)


def groups_of(kinds: list[Kind]) -> list[CacheGroup]:
    return [CacheGroup(f"g{i}", (i,), (), window, keeps) for i, (keeps, window) in enumerate(kinds)]


def hasher_of(tokens: list[int], size: int) -> BlockHasher:
    hasher = BlockHasher(size)
    hasher.extend(np.array(tokens, dtype=np.int32))
    return hasher


def needed_blocks(length: int, kind: Kind, size: int) -> list[int]:
    """Return the blocks of a prefix of ``length`` tokens that the token behind it sees: token by token."""
    return sorted({position // size for position in range(length) if sees(length, position, *kind)})


def sees(token: int, other: int, keeps: Retention, window: int | None) -> bool:
    if window is None:
        return keeps is Retention.FULL or other == token - 1
    return token - other < window if keeps is Retention.SLIDING else token // window == other // window


class ManagerMachine(RuleBasedStateMachine):
    """Sequences come, compute, publish, free their windows, and go; what is findable is kept as a dictionary."""

    @initialize(kinds=st.lists(kinds, min_size=1, max_size=3), size=st.integers(1, 5), blocks=st.integers(4, 60))
    def start(self, kinds: list[Kind], size: int, blocks: int) -> None:
        self.size, self.kinds = size, kinds
        self.manager = KVCacheManager(groups_of(kinds), size, blocks, SLOTS)
        self.state_at: dict[tuple[int, int], int] = {}
        """(group, page) to the number of tokens behind which its state is."""
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
                for g, kind in enumerate(self.kinds)
                for index in needed_blocks(length, kind, self.size)
            ):
                return length
        return 0

    @precondition(lambda self: len(self.tokens) < SLOTS)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24))
    def admit(self, tokens: list[int]) -> None:
        hasher = hasher_of(tokens, self.size)
        hit = self.manager.find_prefix(hasher, len(tokens))
        assert hit.tokens == self.longest(tokens)
        for g, kind in enumerate(self.kinds):
            needed = needed_blocks(hit.tokens, kind, self.size)
            for index, block in enumerate(hit.blocks[g]):
                if index in needed:
                    assert self.content[g, block] == tuple(tokens[: (index + 1) * self.size])
        if not self.manager.can_admit(hit, len(tokens)):
            return
        slot = next(s for s in range(SLOTS) if s not in self.tokens)
        self.manager.admit(slot, hit)
        self.tokens[slot], self.computed[slot] = tokens, hit.tokens

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.integers(1, 9), ahead=st.sampled_from([0, 0, 1, 7]))
    def compute(self, data: st.DataObject, more: int, ahead: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        more = min(more, len(self.tokens[slot]) - self.computed[slot])
        target = self.computed[slot] + self.manager.cut(self.computed[slot], more)
        free = self.manager.pool.num_free
        entries = max(0, -(-(target + ahead) // self.size) - int(self.manager.held[slot]))
        missing, short = 0, entries > 0
        for g, (keeps, _) in enumerate(self.kinds):
            states = -(-target // self.size) > len(self.manager.table(slot, g))
            missing += states if keeps is Retention.STATE else entries
            short |= states and keeps is Retention.STATE
        asked = (np.array([number], dtype=np.int32) for number in (slot, target, ahead))
        assert self.manager.short(*asked).tolist() == [short]
        assert self.manager.has_room(slot, target, ahead) == (missing <= free)
        added = self.manager.grow(slot, target, ahead)
        assert (added is None) == (missing > free)
        if added is None:
            return
        for blocks in added:
            for block in blocks:
                for group in range(len(self.kinds)):
                    self.content.pop((group, block), None)
        self.mix(slot, target)
        # Blocks are published once, when they become full: a copy of a prefix that was findable then stays unpublished.
        first, self.computed[slot] = self.computed[slot] // self.size, target
        self.manager.publish(slot, hasher_of(self.tokens[slot], self.size), target)
        for g, kind in enumerate(self.kinds):
            for index in range(first, target // self.size):
                prefix = tuple(self.tokens[slot][: (index + 1) * self.size])
                block = self.manager.table(slot, g)[index]
                if kind[0] is Retention.STATE and block != NULL_BLOCK:
                    assert self.state_at[g, block] == len(prefix), "a state between two blocks was published"
                if block != NULL_BLOCK and not self.cached(g, prefix):
                    self.content[g, block] = prefix
        self.manager.release_windows(slot, target)

    def mix(self, slot: int, target: int) -> None:
        """Do what a recurrent layer does: read the state behind the computed tokens, write that behind all."""
        before = self.computed[slot]
        for g, (keeps, _) in enumerate(self.kinds):
            if keeps is not Retention.STATE or target == before:
                continue
            table = self.manager.table(slot, g)
            if before:
                assert self.state_at[g, table[(before - 1) // self.size]] == before
            page = table[(target - 1) // self.size]
            assert page != NULL_BLOCK and (g, page) not in self.content, "a snapshot is written over"
            self.state_at[g, page] = target

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
            for g, kind in enumerate(self.kinds):
                table = self.manager.table(slot, g)
                assert len(table) >= -(-computed // self.size)
                assert len(table) == int(self.manager.held[slot]) or kind[0] is Retention.STATE
                kept = {i for i, block in enumerate(table) if block != NULL_BLOCK}
                assert kept >= set(needed_blocks(computed, kind, self.size))
                if computed % self.size == 0:
                    behind = min(needed_blocks(computed, kind, self.size), default=computed // self.size)
                    assert not kept & set(range(behind)), "blocks that nothing needs are free"
        if not self.tokens:
            self.manager.check_idle()


ManagerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestManager = ManagerMachine.TestCase


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 8), length=st.integers(1, 40))
def test_the_last_token_is_always_left_to_compute(size: int, length: int) -> None:
    manager = KVCacheManager(groups_of([FULL]), size, 64, 1)
    tokens = list(range(length))
    manager.admit(0, manager.find_prefix(hasher_of(tokens, size), length))
    assert manager.grow(0, length) is not None
    manager.publish(0, hasher_of(tokens, size), length)
    hit = manager.find_prefix(hasher_of(tokens, size), length)
    assert hit.tokens == (length - 1) // size * size < length


def test_nothing_is_found_where_caching_is_off() -> None:
    manager = KVCacheManager(groups_of([FULL]), 2, 16, 2, caching=False)
    tokens = [1, 2, 3, 4, 5]
    manager.admit(0, manager.find_prefix(hasher_of(tokens, 2), 5))
    manager.grow(0, 5)
    manager.publish(0, hasher_of(tokens, 2), 5)
    assert manager.find_prefix(hasher_of(tokens, 2), 5).tokens == 0


def test_admission_counts_what_a_hit_takes_out_of_the_free_blocks() -> None:
    manager = KVCacheManager(groups_of([FULL]), 2, 5, 2)
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
    manager = KVCacheManager(groups_of([FULL]), 2, 8, 1)
    hit = manager.find_prefix(hasher_of([1], 2), 1)
    manager.admit(0, hit)
    manager.grow(0, 2)
    with pytest.raises(AssertionError, match="slot still holds blocks"):
        manager.admit(0, hit)
    with pytest.raises(AssertionError, match="blocks are still owned"):
        manager.check_idle()


def test_an_encoders_output_has_blocks_of_its_own() -> None:
    groups = [CacheGroup("self", (0,), ()), CacheGroup("cross", (0,), (), retention=Retention.CROSS)]
    manager = KVCacheManager(groups, 4, 9, 2)
    hit = manager.find_prefix(hasher_of([1, 2, 3], 4), 3)
    assert manager.can_admit(hit, 4, encoder_tokens=28), "one block and seven"
    assert not manager.can_admit(hit, 4, encoder_tokens=29)
    manager.admit(0, hit, encoder_tokens=9)
    assert manager.grow(0, 5) is not None
    assert [len(manager.table(0, g)) for g in (0, 1)] == [2, 3]
    manager.publish(0, hasher_of([1, 2, 3, 4, 5], 4), 5)
    manager.release_windows(0, 5)
    assert manager.find_prefix(hasher_of([1, 2, 3, 4, 5], 4), 5).tokens == 4, "the encoder's part bounds no prefix"
    manager.release(0)
    manager.check_idle()
