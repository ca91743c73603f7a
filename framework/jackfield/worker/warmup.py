"""A few made-up steps before the first request, so that no user waits for kernels to be compiled or loaded."""

from __future__ import annotations

from typing import Any

import numpy as np

from jackfield.layers.moe import Moe
from jackfield.protocol import NewSequence, PoolingParams, SamplingParams, SchedulerOutput
from jackfield.worker.model_runner import ModelRunner

PROMPT = 192
"""Tokens of the made-up prompt."""


def warm_up(
    runner: ModelRunner,
    *,
    block_size: int,
    groups: int,
    num_blocks: int,
    max_length: int,
    max_sequences: int,
    max_tokens: int,
    pooling: bool = False,
) -> None:
    """Run a prefill, a chunk beside a decode, and a decode; greedy first, sampled then. With ``pooling`` a prefill.

    What they leave in the cache lies in blocks that nobody owns yet.
    """
    length = min(PROMPT, max_length - 4, (num_blocks - 1) // 2 * block_size, 2 * (max_tokens - 1))
    if length < 2:
        return
    if pooling:
        plan = _plan([(0, 0, length)], SamplingParams(), block_size, groups, length)
        plan.new[0].pooling = PoolingParams()
        runner.launch(plan).result()
        runner.launch(_plan([], SamplingParams(), block_size, groups, length, released=[0])).result()
        return
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=1.0, top_k=50, top_p=0.9)):
        half = length // 2
        for entries in ([(0, 0, half)], [(0, half, 1), (1, 0, half)], [(0, half + 1, 1), (1, half, 1)]):
            fitting = [entry for entry in entries if entry[0] < max_sequences]
            runner.launch(_plan(fitting, params, block_size, groups, length)).result()
    used = list(range(min(2, max_sequences)))
    runner.launch(_plan([], SamplingParams(), block_size, groups, length, released=used)).result()


def warm_experts(model: Any, max_tokens: int) -> None:
    """Run what blocks of experts run at other numbers of tokens too; of blocks that are alike, one."""
    blocks = [module for module in model.modules() if isinstance(module, Moe)]
    for block in {
        (block.config, block.gate_up.scheme.layout, block.down.scheme.layout): block for block in blocks
    }.values():
        block.warm_up(max_tokens)


def _plan(
    entries: list[tuple[int, int, int]],
    params: SamplingParams,
    block_size: int,
    groups: int,
    length: int,
    released: list[int] | None = None,
) -> SchedulerOutput:
    """Return the plan of (slot, first position, tokens) entries; a sequence whose first position is 0 is new."""
    slots, starts, counts = (np.array([e[i] for e in entries], dtype=np.int32) for i in range(3))
    fresh = [slot for slot, start, _ in entries if start == 0]
    per_sequence = -(-(length + 2) // block_size)
    places = np.tile(np.arange(per_sequence, dtype=np.int32), len(fresh))
    owners = np.repeat(np.array(fresh, dtype=np.int32), per_sequence)
    # One block is enough for all places: nothing that is computed here is looked at.
    blocks = (owners, places, np.ones(len(places), dtype=np.int32))
    new = [NewSequence(slot, "warm-up", np.ones(length, dtype=np.int32), length, params, (), seed=0) for slot in fresh]
    return SchedulerOutput(
        step_id=0,
        slots=slots,
        starts=starts,
        counts=counts,
        samples=np.ones(len(entries), dtype=np.bool_),
        new=new,
        released=released or [],
        blocks=[blocks] * groups,
    )
