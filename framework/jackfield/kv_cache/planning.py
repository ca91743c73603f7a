"""What a memory budget buys: how many blocks of which groups, and the longest sequence they can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jackfield.errors import ConfigError
from jackfield.kv_cache.manager import CacheGroup


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The agreed size of a cache.

    Args:
        groups: cache groups. block_size: tokens in a block. num_blocks: blocks, the null block included. page_bytes:
            bytes of one block over all
            layers of the largest group. max_model_len: longest sequence that can be served.
    """

    groups: tuple[CacheGroup, ...]
    block_size: int
    num_blocks: int
    page_bytes: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        """Tokens that one sequence could keep if it were alone."""
        return (self.num_blocks - 1) // max(1, len(self.groups)) * self.block_size

    @property
    def total_bytes(self) -> int:
        """Memory of the whole cache."""
        return self.num_blocks * self.page_bytes


def page_bytes(groups: Sequence[CacheGroup], block_size: int) -> int:
    """Return bytes of one block over all layers.

    Any block can go to any group, and layer j of every group lies in buffer j: so each buffer's page is as large as the
    largest of the layers that share it.
    """
    return sum(buffer_pages(groups, block_size))


def buffer_pages(groups: Sequence[CacheGroup], block_size: int) -> list[int]:
    """Return bytes of one page of each buffer, rounded up so that pages start at multiples of 16 bytes."""
    count = max((len(g.layers) for g in groups), default=0)
    sizes = [[g.specs[j].page_bytes(block_size) for g in groups if j < len(g.layers)] for j in range(count)]
    return [-(-max(layer) // 16) * 16 for layer in sizes]


def plan_cache(
    groups: Sequence[CacheGroup],
    block_size: int,
    *,
    budget_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    num_blocks: int | None = None,
    fit_length: bool = False,
) -> CachePlan:
    """Return the plan for a memory budget, never larger than all sequences could ever fill.

    Args:
        groups: what to hold. block_size: tokens in a block. budget_bytes: memory, unless ``num_blocks`` says how many.
        max_model_len, max_num_seqs: what is wanted. fit_length: whether ``max_model_len`` may be lowered to what fits.

    Raises:
        ConfigError: the budget does not hold one sequence of ``max_model_len``.
    """
    size, count = page_bytes(groups, block_size), max(1, len(groups))
    per_sequence = -(-max_model_len // block_size) * count
    if num_blocks is None:
        useful = per_sequence * max_num_seqs + 1
        num_blocks = min(budget_bytes // size, useful) if size else useful
    held = max(0, num_blocks - 1) // count * block_size
    if held < max_model_len and (held == 0 or not fit_length):
        lower = f"lower max_model_len to {held} or less, or " if held else ""
        raise ConfigError(
            f"the KV cache holds {held} tokens, less than one sequence of max_model_len = {max_model_len}",
            field="model.max_model_len",
            value=max_model_len,
            remedy=f"{lower}give the cache more memory (cache.kv_cache_memory)",
        )
    return CachePlan(tuple(groups), block_size, num_blocks, size, min(max_model_len, held))
