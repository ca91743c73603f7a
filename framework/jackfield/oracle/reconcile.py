"""The last stage: one block size that every backend takes, lengths and budgets that fit together, the graph mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, Any

from jackfield.config import EngineConfig
from jackfield.errors import ConfigError
from jackfield.interfaces import BlockSizes, CacheSpec, GraphSupport, TextConfig
from jackfield.oracle.resolution import AttentionDecision

if TYPE_CHECKING:
    from jackfield.oracle.pipeline import Bench

BLOCK_SIZES = (16, 32, 64, 128, 256, 8, 4, 2, 1)
"""Tried in this order when neither a user nor a platform said anything that fits."""
DEFAULT_BATCHED_TOKENS = 8192
STEP = 16
"""Block sizes for models with recurrent states are multiples of this."""
STATE_BLOCK = 256
"""Tokens between snapshots of the states of a model that keeps nothing else."""
AttentionDecisions = tuple[AttentionDecision, ...]


def reconcile(
    bench: Bench,
    model_config: TextConfig,
    attention: AttentionDecisions,
    dtype: str,
    *,
    asynchronous: bool,
    apart: bool,
) -> tuple[EngineConfig, AttentionDecisions]:
    """Return the final configuration, and the attention decisions with the block size in them.

    Args:
        asynchronous: the platform queues work. apart: a drafter on the host must see every step before the next.
    """
    config = bench.config
    length = _max_length(config, model_config)
    block = _block_size(config, attention)
    recurrent = [d.name for d in attention if d.spec.per == "sequence"]
    drafting = [d.name for d in attention if d.spec.per == "sequence" and d.request.component == "drafter"]
    if drafting:
        raise ConfigError(
            f"layers '{drafting[0]}' of the draft model keep one state per sequence, which cannot go back behind "
            "refused drafts",
            field="speculative.model",
            value=config.speculative.model,
            remedy="use a draft model with attention alone",
        )
    budget = _batched_tokens(config, length)
    derived: dict[str, Any] = {
        "cache.block_size": block,
        "model.max_model_len": length,
        "scheduler.max_num_batched_tokens": budget,
        "scheduler.async_scheduling": _overlaps(config, asynchronous, apart),
    }
    if not config.is_user_set("cache.cache_dtype"):
        derived["cache.cache_dtype"] = dtype
    if any(d.request.kind == "encoder" for d in attention):
        # Every token sees the whole prompt, which nothing keeps: it must be in one step.
        derived |= {"scheduler.enable_chunked_prefill": False, "cache.enable_prefix_caching": False}
        derived["scheduler.max_num_batched_tokens"] = max(budget, length)
    if recurrent and not config.scheduler.enable_chunked_prefill:
        derived["cache.enable_prefix_caching"] = False
    config = config.with_derived(derived, "fits the model and every chosen backend")
    support = min((min(d.prefill.graph_support, d.decode.graph_support) for d in attention), default=GraphSupport.NONE)
    bench.notes.append(f"graphs: {support.name.lower()}, the minimum over the chosen attention backends")
    bench.config = config
    return config, tuple(replace(d, request=replace(d.request, block_size=block)) for d in attention)


def _overlaps(config: EngineConfig, asynchronous: bool, apart: bool) -> bool:
    """Return whether steps overlap: where the platform queues work and nothing on the host must see tokens between
    steps.
    """
    wanted = config.scheduler.async_scheduling
    if wanted and apart:
        raise ConfigError(
            "overlapped scheduling cannot be used with a drafter on the host, where rounds are not recorded",
            field="scheduler.async_scheduling",
            value=True,
            remedy="leave it out, or use no drafter",
        )
    return asynchronous and not apart if wanted is None else bool(wanted)


def _max_length(config: EngineConfig, model_config: TextConfig) -> int:
    wanted = config.model.max_model_len
    if wanted is None:
        return model_config.max_position
    if wanted > model_config.max_position:
        raise ConfigError(
            f"the model was made for sequences of {model_config.max_position} tokens at most",
            field="model.max_model_len",
            value=wanted,
            remedy=f"use {model_config.max_position} or less, or set max_position_embeddings in model.hf_overrides",
        )
    return wanted


def _block_size(config: EngineConfig, attention: AttentionDecisions) -> int:
    specs = {d.name: d.spec for d in attention if d.spec.per == "block" and d.spec.planes}
    wanted = config.cache.block_size
    if wanted is not None and config.is_user_set("cache.block_size"):
        return int(wanted)  # every chosen backend was asked
    tried = (*_sizes_for_states(attention), *((wanted, *BLOCK_SIZES) if wanted else BLOCK_SIZES))
    for size in (*tried, *_own_sizes([spec.block_sizes for spec in specs.values()])):
        if all(spec.block_sizes.allows(size) for spec in specs.values()):
            return int(size)
    allowed = "; ".join(f"{name}: {_words(spec)}" for name, spec in specs.items())
    raise ConfigError(
        f"the chosen attention backends have no block size in common ({allowed})",
        field="cache.block_size",
        value=wanted,
        remedy="force another backend for one of them",
    )


def _sizes_for_states(attention: AttentionDecisions) -> Sequence[int]:
    """Return block sizes at which a page of keys and values is no smaller than a page of a recurrent state: pages of
    all groups come from one pool and have one size.
    """
    states = [d.spec.page_bytes(1) for d in attention if d.spec.per == "sequence"]
    paged = [d.spec.page_bytes(STEP) for d in attention if d.spec.per == "block" and d.spec.planes]
    if not states:
        return ()
    if not paged:
        return (STATE_BLOCK,)
    return tuple(multiple * STEP * -(-max(states) // (multiple * min(paged))) for multiple in (1, 2, 4, 8, 16))


def _own_sizes(sizes: Sequence[BlockSizes]) -> Iterator[int]:
    """Yield what the backends' own limits suggest: sizes that one insists on, and the smallest common multiple."""
    for part in sizes:
        yield from part.only
    step = lcm(*(part.multiple_of for part in sizes))
    yield -(-max((part.smallest for part in sizes), default=1) // step) * step


def _words(spec: CacheSpec) -> str:
    sizes = spec.block_sizes
    return f"one of {sizes.only}" if sizes.only else f"multiples of {sizes.multiple_of} from {sizes.smallest}"


def _batched_tokens(config: EngineConfig, length: int) -> int:
    wanted = config.scheduler.max_num_batched_tokens
    chunked = config.scheduler.enable_chunked_prefill
    if wanted is None:
        return DEFAULT_BATCHED_TOKENS if chunked else max(DEFAULT_BATCHED_TOKENS, length)
    if not chunked and wanted < length:
        if not config.is_user_set("scheduler.max_num_batched_tokens"):
            return length
        raise ConfigError(
            f"without chunked prefill a step must hold a whole prompt of {length} tokens",
            field="scheduler.max_num_batched_tokens",
            value=wanted,
            remedy=f"use {length} or more, or leave chunked prefill on",
        )
    return int(wanted)
