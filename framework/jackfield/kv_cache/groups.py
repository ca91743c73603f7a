"""Cache groups: layers whose pages are allocated together, and how much of a sequence each group must keep.

A group has a block table per sequence with one entry for each block of tokens. What an entry names depends on the
group's retention: the keys and values of those tokens, or (STATE) the recurrent state behind the last of them that was
computed. With that, one rule serves all: the entries from :meth:`CacheGroup.first_needed` on are needed, the ones
before may be freed, and a prefix is a hit when its needed entries are cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from jackfield.interfaces import CacheSpec

MAX_PARTS = 8
"""Most groups that layers of one kind are cut into: each costs block tables and metadata in every step."""


class Retention(Enum):
    """What a group keeps of a sequence."""

    FULL = "full"
    """All blocks."""
    SLIDING = "sliding"
    """Blocks with tokens among the last ``window``, the new one included."""
    CHUNKED = "chunked"
    """Blocks with tokens of the aligned chunk of ``window`` tokens that the new one is in."""
    STATE = "state"
    """One page: the state behind the last computed token. Pages of full blocks are snapshots that prefixes revive."""
    CROSS = "cross"
    """Blocks of an encoder's output, as many as a request says, written once."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose blocks are allocated together.

    Args:
        name: the attention group. layers: indices. specs: the cache of each layer, in the same order. window: tokens
            that stay visible, or None. retention: what is kept; by default what ``window`` says.
    """

    name: str
    layers: tuple[int, ...]
    specs: tuple[CacheSpec, ...]
    window: int | None = None
    retention: Retention | None = None

    @property
    def keeps(self) -> Retention:
        """What the group keeps."""
        if self.retention is not None:
            return self.retention
        return Retention.FULL if self.window is None else Retention.SLIDING

    @property
    def is_state(self) -> bool:
        """Whether its pages are recurrent states."""
        return self.keeps is Retention.STATE

    @property
    def is_cross(self) -> bool:
        """Whether its blocks hold an encoder's output."""
        return self.keeps is Retention.CROSS

    def first_needed(self, num_tokens: int, block_size: int) -> int:
        """Return the first block that the token behind ``num_tokens`` computed ones needs."""
        match self.keeps:
            case Retention.SLIDING:
                return max(0, num_tokens - self._window + 1) // block_size
            case Retention.CHUNKED:
                return num_tokens // self._window * self._window // block_size
            case Retention.STATE:
                return max(0, num_tokens - 1) // block_size
            case _:
                return 0

    def most_blocks(self, num_tokens: int, block_size: int, step_tokens: int) -> int:
        """Return how many blocks a sequence of ``num_tokens`` holds at most at any time, when up to ``step_tokens``
        of it are computed before something is freed.
        """
        full = -(-num_tokens // block_size)
        match self.keeps:
            case Retention.SLIDING | Retention.CHUNKED:
                return min(full, -(-(self._window - 1 + step_tokens) // block_size) + 1)
            case Retention.STATE:
                # The page that is read, and those that the steps in flight write.
                return min(full, 3)
            case Retention.CROSS:
                return 0
            case _:
                return full

    def new_blocks(self, held: int, wanted: int) -> list[bool]:
        """Return for each table entry from ``held`` to ``wanted`` whether it gets a page of its own."""
        if self.is_cross:
            return []
        count = max(0, wanted - held)
        if not count:
            return []
        return [False] * (count - 1) + [True] if self.is_state else [True] * count

    @property
    def _window(self) -> int:
        assert self.window is not None, f"group {self.name} has no window"
        return self.window


def retention_of(kind: str, spec: CacheSpec) -> Retention:
    """Return what layers of an attention kind keep."""
    if spec.per == "sequence":
        return Retention.STATE
    if kind == "cross":
        return Retention.CROSS
    if spec.window is None:
        return Retention.FULL
    return Retention.CHUNKED if kind == "chunked_local" else Retention.SLIDING


def split_layers(groups: Mapping[str, Sequence[int]]) -> dict[str, list[tuple[int, ...]]]:
    """Return each group's layers in parts of nearly equal size over all groups.

    Any block can go to any group, so a block is as large as the largest group's layers need: groups of very different
    sizes would waste most of what the small ones get.

    >>> split_layers({"full": [5, 11], "sliding": [0, 1, 2, 3, 4]})
    {'full': [(5, 11)], 'sliding': [(0, 1), (2, 3), (4,)]}
    """
    counts = [len(layers) for layers in groups.values() if layers]
    smallest, largest = min(counts, default=0), max(counts, default=0)
    if largest * 2 <= smallest * 3:
        return {name: [tuple(layers)] for name, layers in groups.items()}
    size = max(smallest, -(-largest // MAX_PARTS))
    return {
        name: [tuple(layers[at : at + size]) for at in range(0, len(layers), size)] for name, layers in groups.items()
    }
