"""Recorded rounds are taken where they pay, and all that is measured moves with what is."""

from __future__ import annotations

import numpy as np
import pytest

from jackfield.protocol import Recordings
from jackfield.scheduler.round_lengths import RoundLengths

DECODES = {1: 1.0, 4: 1.1, 16: 1.5, 64: 3.0}
ROUNDS = {1: 1.3, 4: 1.6, 16: 4.0}


def lengths(slots: int = 64, **options: object) -> RoundLengths:
    return RoundLengths(slots, 4, Recordings(DECODES, ROUNDS, drafts=True), **options)  # type: ignore[arg-type]


def serve(chooser: RoundLengths, count: int, rate: float, steps: int = 400) -> tuple[int, float]:
    """Return steps with drafts, and tokens in the unit of time, of sequences that keep each draft by chance."""
    random, slots = np.random.default_rng(3), np.arange(count, dtype=np.int32)
    able, rounds, tokens, clock = np.ones(count, dtype=np.bool_), 0, 0, 0.0
    drafts = np.zeros(count, dtype=np.int32)
    for _ in range(steps):
        kept = np.minimum(np.cumprod(random.random((count, 4)) < rate, axis=1).sum(1), drafts).astype(np.int32)
        chooser.acceptance.observe(slots, drafts, kept)
        known = ROUNDS if drafts.any() else DECODES
        took = known[min(size for size in known if size >= count)]
        chooser.measure(count, took, drafts=bool(drafts.any()))
        rounds, tokens, clock = rounds + bool(drafts.any()), tokens + count + int(kept.sum()), clock + took
        drafts = chooser.choose(slots, able)
    return rounds, tokens / clock


@pytest.mark.parametrize(("count", "rate", "pays"), [(1, 0.6, True), (1, 0.1, False), (4, 0.7, True), (16, 0.5, False)])
def test_rounds_are_taken_where_they_pay(count: int, rate: float, pays: bool) -> None:
    rounds, speed = serve(lengths(), count, rate)
    assert rounds > 300 if pays else rounds < 100
    plain = count / DECODES[min(size for size in DECODES if size >= count)]
    assert speed > 1.2 * plain if pays else speed > 0.94 * plain


def test_all_or_none_and_only_those_that_are_able() -> None:
    chooser, slots = lengths(), np.arange(4, dtype=np.int32)
    able = np.array([True, False, True, True])
    assert chooser.choose(slots, able).tolist() == [4, 0, 4, 4]
    assert chooser.choose(slots, ~np.ones(4, dtype=np.bool_)).tolist() == [0] * 4
    many = np.arange(17, dtype=np.int32)
    assert not chooser.choose(many, np.ones(17, dtype=np.bool_)).any(), "rounds of 17 are not recorded"


def test_too_many_for_drafts() -> None:
    assert [lengths().hopeless(count) for count in (1, 16, 17, 500)] == [False, False, True, True]
    assert not lengths(slots=8).hopeless(500), "no more than 8 run at once"
    assert not lengths(adaptive=False).hopeless(64)
    assert lengths(largest_batch=3).hopeless(4)
    assert lengths().fits(16) and not lengths().fits(17) and not lengths().fits(0)


def test_what_is_measured_counts_and_a_disturbance_does_not() -> None:
    chooser, slots, able = lengths(), np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.bool_)
    assert chooser.choose(slots, able).tolist() == [4]
    chooser.measure(1, 1000.0, drafts=True)
    assert chooser.choose(slots, able).tolist() == [4]
    for _ in range(40):
        chooser.measure(1, 4.0, drafts=True)
    assert chooser.choose(slots, able).tolist() == [0]


def test_what_was_bad_is_tried_again_later() -> None:
    chooser, slots, able = lengths(), np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.bool_)
    for _ in range(30):
        chooser.acceptance.observe(slots, np.full(1, 4, dtype=np.int32), np.zeros(1, dtype=np.int32))
    chosen = [int(chooser.choose(slots, able)[0]) for _ in range(2000)]
    assert chosen[0] == 0 and 4 in chosen


def test_steady_sequences_always_draft() -> None:
    chooser, slots, able = lengths(), np.arange(2, dtype=np.int32), np.ones(2, dtype=np.bool_)
    chooser.fill(0, steady=True)
    chooser.fill(1, steady=False)
    for _ in range(30):
        chooser.acceptance.observe(slots, np.full(2, 4, dtype=np.int32), np.zeros(2, dtype=np.int32))
    assert chooser.choose(slots, able).tolist() == [4, 0]
