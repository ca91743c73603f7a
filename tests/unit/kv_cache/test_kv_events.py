"""Events of the prefix cache, replayed into a dictionary, are the pool's own index."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.interfaces import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from jackfield.kv_cache import BlockHasher, CacheGroup, KVCacheManager

SIZE = 4


class Copy:
    """An index kept by replaying events. Each prefix knows its parent and its own tokens."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, bytes], tuple[bytes | None, list[int]]] = {}

    def replay(self, events: list[CacheEvent]) -> None:
        wire = msgspec.msgpack.encode(events)
        for event in msgspec.msgpack.decode(wire, type=list[CacheEvent]):
            if isinstance(event, CacheCleared):
                self.known.clear()
            elif isinstance(event, BlocksRemoved):
                for name in event.hashes:
                    del self.known[event.group, name]
            else:
                self._store(event)

    def _store(self, event: BlocksStored) -> None:
        assert len(event.token_ids) == len(event.hashes) * event.block_size
        parent = event.parent
        for at, name in enumerate(event.hashes):
            assert (event.group, name) not in self.known, "stored twice"
            ids = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
            self.known[event.group, name] = (parent, ids)
            parent = name


class World:
    """Sequences that come, grow, and go, over a small pool; some begin alike."""

    def __init__(self, seed: int, windows: tuple[int | None, ...], *, events: bool = True) -> None:
        groups = [CacheGroup(f"g{i}", (i,), (), window) for i, window in enumerate(windows)]
        self.cache = KVCacheManager(groups, SIZE, 14 * len(groups) + 1, 3, events=events)
        self.rng = random.Random(seed)
        self.copy = Copy()
        self.tokens: dict[int, list[int]] = {}
        self.hashers: dict[int, BlockHasher] = {}
        self.computed: dict[int, int] = {}

    def act(self) -> None:
        """Do one random thing."""
        slot = self.rng.randrange(3)
        if slot not in self.tokens:
            self._come(slot)
        elif self.rng.random() < 0.25:
            self.cache.release(slot)
            del self.tokens[slot]
        else:
            self._grow(slot, self.rng.randint(1, 9))
        if self.rng.random() < 0.05:
            for held in self.tokens:
                self.cache.release(held)
            self.tokens.clear()
            assert self.cache.pool.reset_prefixes()

    def _come(self, slot: int) -> None:
        tokens = [self.rng.randrange(2)] * self.rng.randint(1, 3) * SIZE + self.rng.choices(range(3), k=5)
        hasher = BlockHasher(SIZE)
        hasher.extend(np.array(tokens))
        hit = self.cache.find_prefix(hasher, len(tokens))
        if not self.cache.can_admit(hit, len(tokens)):
            return
        self.cache.admit(slot, hit)
        self.tokens[slot], self.hashers[slot], self.computed[slot] = tokens, hasher, hit.tokens
        self._grow(slot, 0)

    def _grow(self, slot: int, count: int) -> None:
        tokens = [*self.tokens[slot], *self.rng.choices(range(3), k=count)]
        if len(tokens) > 40 or self.cache.grow(slot, len(tokens)) is None:
            return
        self.tokens[slot] = tokens
        array = np.array(tokens, dtype=np.int32)
        self.hashers[slot].extend(array)
        self.cache.publish(slot, self.hashers[slot], len(tokens), array)
        self.cache.release_windows(slot, len(tokens))

    def check(self) -> None:
        """Compare the copy with the pool's index, and every prefix of the copy with hashes made anew."""
        self.copy.replay(self.cache.take_events())
        assert set(self.copy.known) == set(self.cache.pool._block_of)
        for (_, name), (parent, ids) in self.copy.known.items():
            assert len(ids) == SIZE
            assert parent != name
        for tokens in self.tokens.values():
            fresh = BlockHasher(SIZE)
            fresh.extend(np.array(tokens))
            for group in range(len(self.cache.groups)):
                for at, name in enumerate(fresh.hashes):
                    if (group, name) in self.copy.known:
                        parent = fresh.hashes[at - 1] if at else None
                        assert self.copy.known[group, name] == (parent, tokens[at * SIZE : (at + 1) * SIZE])


@given(st.integers(0, 2**32), st.sampled_from([(None,), (None, 8), (5,)]))
@settings(max_examples=40, deadline=None)
def test_the_replayed_index_is_the_pools(seed: int, windows: tuple[int | None, ...]) -> None:
    world = World(seed, windows)
    for _ in range(60):
        world.act()
        world.check()


def test_every_kind_of_event_occurs() -> None:
    world = World(3, (None, 8))
    seen: set[str] = set()
    for _ in range(400):
        world.act()
        events = world.cache.take_events()
        seen |= {type(event).__name__ for event in events}
        world.copy.replay(events)
    assert seen == {"BlocksStored", "BlocksRemoved", "CacheCleared"}


def test_neighbours_are_one_event_with_the_block_before_them() -> None:
    cache = KVCacheManager([CacheGroup("g", (0,), ())], SIZE, 9, 1, events=True)
    hasher, tokens = BlockHasher(SIZE), np.arange(16, dtype=np.int32)
    hasher.extend(tokens)
    cache.grow(0, 16)
    cache.publish(0, hasher, 8, tokens)
    cache.publish(0, hasher, 16, tokens)
    h = hasher.hashes
    assert cache.take_events() == [
        BlocksStored(0, h[:2], None, [*range(8)], SIZE),
        BlocksStored(0, h[2:], h[1], [*range(8, 16)], SIZE),
    ]
    cache.release(0)
    cache.grow(0, 32)
    (removed,) = cache.take_events()
    assert isinstance(removed, BlocksRemoved)
    assert sorted(removed.hashes) == sorted(h)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_collected_unless_asked_for(seed: int) -> None:
    world = World(seed, (None,), events=False)
    held = 0
    for _ in range(50):
        world.act()
        held = max(held, len(world.cache.pool._block_of))
    assert world.cache.take_events() == []
    assert held > 0, "there was something to tell"
