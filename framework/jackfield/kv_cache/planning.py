"""What a memory budget buys: how many blocks of which groups, and the longest sequence they can hold."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from jackfield.errors import ConfigError
from jackfield.interfaces import CacheSpec
from jackfield.kv_cache.groups import CacheGroup, Retention

NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The agreed size of a cache.

    Args:
        groups: cache groups. block_size: tokens in a block. num_blocks: blocks, the null block included. page_bytes:
            bytes of one block over all layers of the largest group. max_model_len: longest sequence that can be served.
        step_tokens: most tokens of a sequence that are computed before windows are freed.
    """

    groups: tuple[CacheGroup, ...]
    block_size: int
    num_blocks: int
    page_bytes: int
    max_model_len: int
    step_tokens: int = NO_LIMIT

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds: of sequences of the maximum length, where groups do not keep all of them."""
        if all(group.keeps is Retention.FULL for group in self.groups):
            return (self.num_blocks - 1) // max(1, len(self.groups)) * self.block_size
        blocks = sequence_blocks(self.groups, self.max_model_len, self.block_size, self.step_tokens)
        return (self.num_blocks - 1) * self.max_model_len // blocks

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
    """Return bytes of one page of each buffer, planes and pages starting at multiples of 16 bytes."""
    count = max((len(g.layers) for g in groups), default=0)
    sizes = [[_padded(g.specs[j], block_size) for g in groups if j < len(g.layers)] for j in range(count)]
    return [max(layer) for layer in sizes]


def _padded(spec: CacheSpec, block_size: int) -> int:
    return sum(-(-plane.page_bytes(block_size) // 16) * 16 for plane in spec.planes)


def sequence_blocks(groups: Sequence[CacheGroup], length: int, block_size: int, step_tokens: int) -> int:
    """Return how many blocks a sequence of ``length`` tokens holds at most at any time."""
    return sum(group.most_blocks(length, block_size, step_tokens) for group in groups)


def plan_cache(
    groups: Sequence[CacheGroup],
    block_size: int,
    *,
    budget_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    num_blocks: int | None = None,
    fit_length: bool = False,
    step_tokens: int = NO_LIMIT,
) -> CachePlan:
    """Return the plan for a memory budget, never larger than all sequences could ever fill.

    Args:
        groups: what to hold. block_size: tokens in a block. budget_bytes: memory, unless ``num_blocks`` says how many.
        max_model_len, max_num_seqs: what is wanted. fit_length: whether ``max_model_len`` may be lowered to what fits.
        step_tokens: most tokens of a sequence that are computed before windows are freed.

    Raises:
        ConfigError: the budget does not hold one sequence of ``max_model_len``.
    """
    size = page_bytes(groups, block_size)
    if num_blocks is None:
        useful = max(1, sequence_blocks(groups, max_model_len, block_size, step_tokens)) * max_num_seqs + 1
        num_blocks = min(budget_bytes // size, useful) if size else useful

    def fits(length: int) -> bool:
        return sequence_blocks(groups, length, block_size, step_tokens) < num_blocks

    held = bisect_left(range(1, max_model_len + 1), True, key=lambda length: not fits(length))
    if held < max_model_len and (held == 0 or not fit_length):
        lower = f"lower max_model_len to {held} or less, or " if held else ""
        raise ConfigError(
            f"the KV cache holds {held} tokens, less than one sequence of max_model_len = {max_model_len}",
            field="model.max_model_len",
            value=max_model_len,
            remedy=f"{lower}give the cache more memory (cache.kv_cache_memory)",
        )
    return CachePlan(tuple(groups), block_size, num_blocks, size, min(max_model_len, held), step_tokens)
