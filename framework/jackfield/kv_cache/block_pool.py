"""BlockPool: the blocks of a cache, their owners, and the prefixes they hold.

Accounting invariant, checked by :meth:`BlockPool.check`. Every block but the null block is in exactly one place:

    free queue  [oldest ... newest]   references == 0; may still hold a hashed prefix that a request can revive
    owned       references >= 1       one reference per block-table entry that names it

The null block 0 is never handed out: padding writes land in it and entries of freed windows point to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from jackfield.kv_cache.events import EventLog

NULL_BLOCK = 0

Key = tuple[int, bytes]
"""(cache group, chain hash)."""


class BlockPool:
    """A fixed number of blocks with reference counts and an index of prefixes.

    Args:
        num_blocks: the null block included. events: is told which prefixes are forgotten, or None.
    """

    def __init__(self, num_blocks: int, events: EventLog | None = None) -> None:
        assert num_blocks >= 2, "a pool needs the null block and one more"
        self.num_blocks = num_blocks
        self._events = events
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._key_of: dict[int, Key] = {}
        self._block_of: dict[Key, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those with revivable prefixes included."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Blocks that exist for requests."""
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, least recently freed first; their old prefixes are forgotten. The caller made sure
        that there are enough.
        """
        assert count <= len(self._free), "allocation beyond the free blocks"
        taken = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that hold a wanted prefix, reviving free ones."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each block. Blocks nobody owns become free, in the given order (first given is reused
        first).
        """
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} released twice"
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def lookup(self, key: Key) -> int | None:
        """Return a block that holds the prefix, or None."""
        return self._block_of.get(key)

    def publish(self, block: int, key: Key) -> bool:
        """Say that ``block`` now holds the whole prefix ``key``. A prefix that another block holds already stays with
        that one; returns whether the index changed.
        """
        fresh = key not in self._block_of and block not in self._key_of
        if fresh:
            self._block_of[key] = block
            self._key_of[block] = key
        return fresh

    def is_free(self, block: int) -> bool:
        """Return whether nobody owns ``block``."""
        return self._references[block] == 0

    def reset_prefixes(self) -> bool:
        """Forget all prefixes; returns False, and does nothing, while any block is owned."""
        if self.num_free != self.num_usable:
            return False
        self._key_of.clear()
        self._block_of.clear()
        if self._events is not None:
            self._events.cleared()
        return True

    def check(self) -> None:
        """Raise AssertionError unless the accounting invariant holds."""
        assert self._references[NULL_BLOCK] == 0 and NULL_BLOCK not in self._free, "the null block was handed out"
        for block in range(1, self.num_blocks):
            assert (self._references[block] == 0) == (block in self._free), f"block {block} is lost or owned while free"
        assert all(self._block_of[key] == block for block, key in self._key_of.items()), "prefix index out of step"
        assert len(self._key_of) == len(self._block_of), "prefix index out of step"

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            if self._events is not None:
                self._events.removed(*key)
