"""Draws follow the distribution that the parameters describe."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_world import Values, World, chi_square, filtered, params

from jackfield.sampling.random import uniform

LOGITS = [1.0, -0.5, 2.0, 0.3, 2.0, -3.0, 0.9, 1.4]
DRAWS = 100_000

CASES: list[Values] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 3},
    {"top_k": 1},
    {"top_k": 100},
    {"top_p": 0.6},
    {"top_p": 0.95},
    {"top_p": 1e-6},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 5, "top_p": 0.7},
    {"top_k": 6, "min_p": 0.15, "temperature": 1.7},
    {"top_p": 0.8, "min_p": 0.2},
    {"top_k": 4, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8},
]


def draw(logits: list[float], values: Values, draws: int = DRAWS, seeds: int = 4) -> npt.NDArray[np.int64]:
    """Return how often each token came out, over several seeds and many positions."""
    world = World()
    for slot in range(seeds):
        world.add(slot, params(**values), seed=1000 + slot)
    slots, positions = np.arange(draws) % seeds, np.arange(draws) // seeds
    ids = world.sample(torch.tensor(logits).expand(draws, -1), slots.tolist(), positions.tolist())
    return np.bincount(ids, minlength=len(logits))


@pytest.mark.parametrize("values", CASES, ids=lambda v: ",".join(f"{k}={x}" for k, x in v.items()) or "plain")
def test_frequencies_follow_the_softmax(values: Values) -> None:
    counts = draw(LOGITS, values)
    expected = filtered(LOGITS, **values)
    assert counts[expected == 0].sum() == 0
    statistic, limit = chi_square(counts, expected)
    assert statistic < limit


def test_a_wide_vocabulary_is_sorted_where_top_k_is_large() -> None:
    logits = np.random.default_rng(0).normal(size=1200).tolist()
    counts = draw(logits, {"top_k": 1100, "top_p": 0.3}, draws=8000)
    expected = filtered(logits, top_k=1100, top_p=0.3)
    assert counts[expected == 0].sum() == 0
    statistic, limit = chi_square(counts, expected)
    assert statistic < limit


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8, width=16), min_size=2, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_nothing_outside_the_filters_is_drawn(
    logits: list[float], top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    world = World(1)
    world.add(0, params(top_k=top_k, top_p=top_p, min_p=min_p), seed=seed)
    ids = world.sample(torch.tensor(logits).expand(200, -1), [0] * 200, list(range(200)))
    # Filters are applied in float32: a token whose share lies within rounding of a border may be on either side.
    loose = filtered(logits, min_p=min_p * (1 - 1e-4), top_k=top_k, top_p=min(1.0, top_p + 1e-4))
    assert set(ids) <= set(np.flatnonzero(loose).tolist())


def test_rows_of_all_ways_share_a_step() -> None:
    world = World()
    kinds: list[Values] = [
        {"temperature": 0},
        {},
        {"top_k": 2},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"top_k": 2, "top_p": 0.5},
    ]
    for slot, values in enumerate(kinds):
        world.add(slot, params(**values), seed=slot)
    slots = np.arange(60_000) % len(kinds)
    ids = np.array(
        world.sample(torch.tensor(LOGITS).expand(len(slots), -1), slots.tolist(), (np.arange(len(slots))).tolist())
    )
    assert set(ids[slots == 0].tolist()) == {2}
    for slot, values in enumerate(kinds[1:], start=1):
        counts = np.bincount(ids[slots == slot], minlength=len(LOGITS))
        expected = filtered(LOGITS, **values)
        assert counts[expected == 0].sum() == 0
        statistic, limit = chi_square(counts, expected)
        assert statistic < limit


def test_uniform_numbers_are_uniform_and_unrelated() -> None:
    positions = torch.arange(50_000)
    first, second = (uniform(torch.full_like(positions, seed), positions) for seed in (7, 8))
    for numbers in (first, second, (first - second) % 1.0, (first[1:] - first[:-1]) % 1.0):
        counts = torch.histc(numbers, bins=64, min=0.0, max=1.0).long().numpy()
        statistic, limit = chi_square(counts, np.full(64, 1 / 64))
        assert statistic < limit
    assert bool((first >= 0).all()) and bool((first < 1).all())


def test_uniform_numbers_are_those_of_the_published_generator() -> None:
    """The first outputs of SplitMix64 for seed 1234567, whose state after k steps is seed + k * golden ratio."""

    def finalize(z: int) -> int:
        mask = (1 << 64) - 1
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    assert [finalize((1234567 + k * 0x9E3779B97F4A7C15) % 2**64) for k in (1, 2)] == [
        6457827717110365317,
        3203168211198807973,
    ]
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 42):
        for position in (0, 1, 5, 131071):
            bits = finalize((finalize(seed % 2**64) + position * 0x9E3779B97F4A7C15) % 2**64)
            got = uniform(torch.tensor([seed]), torch.tensor([position])).item()
            assert got == (bits >> 11) / 2**53
