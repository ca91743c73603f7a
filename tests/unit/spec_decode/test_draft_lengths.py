"""The number of drafts follows what was measured: a simulated server is never slower than without drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from jackfield.scheduler.draft_lengths import PROBE, WARMUP, DraftLengths, StepCost

Cost = Callable[[int], float]


def linear(fixed: float, each: float) -> Cost:
    return lambda tokens: fixed + each * tokens


def roofline(knee: int) -> Cost:
    return lambda tokens: float(max(tokens, knee))


def serve(
    cost: Cost, rate: float, batch: int, width: int, *, adaptive: bool, steps: int = 600, drafting: float = 0.0
) -> float:
    """Return tokens per second of a batch whose drafts are kept with probability ``rate`` each."""
    random = np.random.default_rng(1)
    lengths = DraftLengths(batch, width, adaptive=adaptive)
    slots = np.arange(batch, dtype=np.int32)
    drafts, tokens, seconds = np.zeros(batch, dtype=np.int32), 0, 0.0
    for _ in range(steps):
        right = np.cumprod(random.random((batch, width)) < rate, axis=1).sum(1)
        kept = np.minimum(right, drafts).astype(np.int32)
        lengths.acceptance.observe(slots, drafts, kept)
        took = cost(batch + int(drafts.sum()))
        limits = lengths.choose(slots)
        drafted = drafting * int(limits.max())
        lengths.cost.add(batch + int(drafts.sum()), took)
        if limits.any():
            lengths.cost.add_drafting(int(limits.max()), drafted)
        tokens += batch + int(kept.sum())
        seconds += took + drafted
        drafts = limits
    return tokens / seconds


@cache
def kept_of_fixed(rate: float, batch: int, width: int, steps: int) -> int:
    """Return how many drafts are kept where each sequence gets ``width`` drafts in all steps but the first; what a step
    costs does not matter.
    """
    random, kept = np.random.default_rng(1), 0
    for step in range(steps):
        right = np.cumprod(random.random((batch, width)) < rate, axis=1).sum(1)
        kept += int(right.sum()) if step else 0
    return kept


def serve_fixed(cost: Cost, rate: float, batch: int, width: int, steps: int = 600) -> float:
    """Return what :func:`serve` does where every sequence always gets ``width`` drafts."""
    seconds = cost(batch) + (steps - 1) * cost(batch * (1 + width))
    return (steps * batch + kept_of_fixed(rate, batch, width, steps)) / seconds


def test_fixed_drafts_are_served_as_the_simulation_says() -> None:
    found = serve(linear(8, 1), 0.3, 4, 3, adaptive=False)
    assert serve_fixed(linear(8, 1), 0.3, 4, 3) == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("batch", [1, 4, 128])
@pytest.mark.parametrize("cost", [linear(64, 1), linear(8, 1), linear(0, 1), roofline(64)], ids=["a", "b", "c", "d"])
def test_a_server_is_never_slower_than_without_drafts(cost: Cost, batch: int, rate: float) -> None:
    without = batch / cost(batch)
    found = serve(cost, rate, batch, 4, adaptive=True)
    best = max(without, *(serve_fixed(cost, rate, batch, width) for width in (1, 2, 3, 4)))
    assert found >= 0.97 * without
    assert found >= 0.88 * best


@pytest.mark.parametrize("batch", [1, 32])
def test_a_slow_drafter_is_asked_only_where_it_pays(batch: int) -> None:
    cost = linear(64, 1)
    without = batch / cost(batch)
    assert serve(cost, 0.3, batch, 4, adaptive=False, drafting=60.0) < 0.6 * without
    assert serve(cost, 0.3, batch, 4, adaptive=True, drafting=60.0) > 0.95 * without


def test_alone_every_draft_pays_and_in_a_full_batch_only_likely_ones() -> None:
    lengths = DraftLengths(64, 4)
    slots = np.arange(64, dtype=np.int32)
    full, half = np.full(64, 4, dtype=np.int32), slots // 32
    for _ in range(30):
        lengths.acceptance.observe(slots, full, np.where(half == 0, 4, 0).astype(np.int32))
        for tokens in (1, 64, 320):
            lengths.cost.add(tokens, 20.0 + tokens)
    assert lengths.choose(slots[:1]).tolist() == [4]
    chosen = lengths.choose(slots)
    assert chosen[half == 0].tolist() == [4] * 32
    assert chosen[half == 1].max() == 0


def test_the_cost_of_a_step_is_found() -> None:
    cost = StepCost()
    random = np.random.default_rng(0)
    for tokens in random.integers(1, 100, 200).tolist():
        cost.add(tokens, (0.03 + 0.002 * tokens) * random.uniform(0.9, 1.1))
    found = cost.at(np.array([2, 10, 50, 99]))
    assert found == pytest.approx(0.03 + 0.002 * np.array([2, 10, 50, 99]), rel=0.1)


def test_a_disturbance_is_left_out() -> None:
    cost = StepCost()
    for tokens in range(1, 40):
        cost.add(tokens, 0.01 + 0.001 * tokens)
    some = np.arange(1, 60)
    before = cost.at(some)
    cost.add(10, 5.0)
    assert (cost.at(some) == before).all()


def test_steady_sequences_and_limits() -> None:
    lengths = DraftLengths(8, 3, largest_batch=6)
    slots = np.arange(6, dtype=np.int32)
    lengths.fill(2, steady=True)
    for _ in range(2 * WARMUP):
        lengths.cost.add(6, 6.0)
        lengths.cost.add(24, 24.0)
        lengths.acceptance.observe(slots, np.full(6, 3, dtype=np.int32), np.zeros(6, dtype=np.int32))
    assert lengths.choose(slots).tolist() == [0, 0, 3, 0, 0, 0]
    assert lengths.choose(np.arange(7, dtype=np.int32)).tolist() == [0] * 7
    probes = [lengths.choose(slots).max(initial=0, where=slots != 2) for _ in range(2 * PROBE)]
    assert sum(probes) == 2, "now and then it is tried again"
    lengths.fill(2, steady=False)
    assert lengths.acceptance.rates(slots[2:3])[0] < 0.6


def test_without_adaptation_everybody_gets_all() -> None:
    lengths = DraftLengths(4, 3, adaptive=False)
    lengths.acceptance.observe(np.arange(4), np.full(4, 3), np.zeros(4, dtype=np.int32))
    assert lengths.choose(np.arange(4, dtype=np.int32)).tolist() == [3] * 4
