"""BlockPool against a model that keeps every fact in plain dictionaries."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jackfield.kv_cache import BlockPool
from jackfield.kv_cache.block_pool import NULL_BLOCK, Key

BLOCKS = 9
keys = st.integers(0, 11).map(lambda n: (n % 2, bytes([n])))


class PoolMachine(RuleBasedStateMachine):
    """Random operations; ``held`` is one entry per reference, ``content`` what each block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.held: list[int] = []
        self.content: dict[int, Key] = {}

    @precondition(lambda self: self.pool.num_free > 0)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.num_free))
        taken = self.pool.allocate(count)
        assert len(set(taken)) == count
        assert NULL_BLOCK not in taken
        assert not set(taken) & set(self.held)
        self.held += taken
        for block in taken:
            self.content.pop(block, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.release([block, NULL_BLOCK])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=keys)
    def publish(self, data: st.DataObject, key: Key) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.publish(block, key)
        if key not in self.content.values() and block not in self.content:
            self.content[block] = key

    @rule(key=keys)
    def reuse(self, key: Key) -> None:
        block = self.pool.lookup(key)
        assert block == next((b for b, k in self.content.items() if k == key), None)
        if block is not None:
            self.pool.acquire([block])
            self.held.append(block)

    @rule()
    def reset(self) -> None:
        done = self.pool.reset_prefixes()
        assert done == (not self.held)
        if done:
            self.content.clear()

    @invariant()
    def accounts_agree(self) -> None:
        self.pool.check()
        assert self.pool.num_free == BLOCKS - 1 - len(set(self.held))
        assert all(self.pool.is_free(block) == (block not in self.held) for block in range(1, BLOCKS))


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_blocks_without_a_prefix_are_reused_before_those_that_hold_one() -> None:
    pool = BlockPool(5)
    a, b, c, d = pool.allocate(4)
    pool.publish(a, (0, b"a"))
    pool.publish(c, (0, b"c"))
    pool.release([a, b, c, d])
    assert set(pool.allocate(2)) == {b, d}
    assert pool.lookup((0, b"a")) == a
    assert pool.allocate(1) == [a], "of those that hold a prefix the one that was freed first"
    assert pool.lookup((0, b"a")) is None
    assert pool.lookup((0, b"c")) == c


def test_a_prefix_stays_with_the_block_that_had_it_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.publish(first, (0, b"x"))
    pool.publish(second, (0, b"x"))
    assert pool.lookup((0, b"x")) == first
    pool.publish(first, (0, b"y"))
    assert pool.lookup((0, b"y")) is None


def test_misuse_is_caught() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="beyond the free blocks"):
        pool.allocate(2)
    pool.release([block])
    with pytest.raises(AssertionError, match=f"block {block} released twice"):
        pool.release([block])
    with pytest.raises(AssertionError, match="null block and one more"):
        BlockPool(1)


def test_check_finds_a_lost_block() -> None:
    pool = BlockPool(4)
    del pool._free[2]
    with pytest.raises(AssertionError, match="block 2 is lost"):
        pool.check()
