"""What happens to the prefixes that a KV cache holds, as data: enough to keep a copy of its index elsewhere.

A prefix is named by the chain hash of its last block: it covers every token before it, the tenant's salt and the
adapter. Replaying the events in order gives the set of prefixes that a request can find.
"""

from __future__ import annotations

import msgspec


class BlocksStored(msgspec.Struct, frozen=True, tag="stored"):
    """Prefixes that can be found from now on: neighbouring blocks of one sequence, first to last.

    Args:
        group: index of the cache group. hashes: of each block. parent: of the block before the first; None at the start
            of a sequence.
        token_ids: of all blocks, ``block_size`` for each. block_size: tokens in a block.
    """

    group: int
    hashes: list[bytes]
    parent: bytes | None
    token_ids: list[int]
    block_size: int


class BlocksRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """Prefixes that cannot be found any more: their blocks are used for something else."""

    group: int
    hashes: list[bytes]


class CacheCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """No prefix can be found any more."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared
