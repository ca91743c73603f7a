from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.errors import ConfigError
from jackfield.interfaces import DraftBatch, DrafterEnv, DrafterRequest, Settings
from jackfield_spec_decode.ngram import NgramDrafter

MAX_LENGTH = 120


def build(num_tokens: int = 3, **options: int) -> NgramDrafter:
    return NgramDrafter.build(
        DrafterEnv(DrafterRequest(num_tokens=num_tokens), 4, MAX_LENGTH, settings=Settings(options))
    )


def propose(
    drafter: NgramDrafter, sequences: dict[int, Sequence[int]], limits: Sequence[int] | None = None
) -> list[list[int]]:
    """Return the drafts of each sequence, in the given order; unused cells of the table hold a token of nobody."""
    table = np.full((4, MAX_LENGTH), 99, dtype=np.int32)
    for slot, tokens in sequences.items():
        table[slot, : len(tokens)] = tokens
    slots = np.array(list(sequences), dtype=np.int32)
    lengths = np.array([len(tokens) for tokens in sequences.values()], dtype=np.int32)
    bounds = np.array(limits if limits is not None else [MAX_LENGTH] * len(slots), dtype=np.int32)
    ids = np.asarray(drafter.propose(DraftBatch(slots, table, lengths, bounds)).ids)
    rows = []
    for row in ids.tolist():
        kept = [token for token in row if token >= 0]
        assert row == kept + [-1] * (len(row) - len(kept)), "padding lies behind the drafts"
        rows.append(kept)
    return rows


def brute_force(tokens: Sequence[int], shortest: int, longest: int, count: int) -> list[int]:
    """Scan the whole sequence from the end, longest suffix first."""
    for size in range(longest, shortest - 1, -1):
        suffix = list(tokens[len(tokens) - size :])
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(tokens) > size and list(tokens[end - size : end]) == suffix:
                return continued(tokens, end, count)
    return []


def continued(tokens: Sequence[int], end: int, count: int) -> list[int]:
    """Copy token by token from ``end`` on, what was copied included."""
    grown = list(tokens)
    for at in range(count):
        grown.append(grown[end + at])
    return grown[len(tokens) :]


def test_a_loop_goes_on_past_the_end_of_the_context() -> None:
    assert propose(build(min_n=2, max_n=2), {0: [9, 5, 6, 5, 6]}) == [[5, 6, 5]]
    assert propose(build(min_n=2, max_n=4), {0: [4, 7, 7, 7, 7]}) == [[7, 7, 7]]


def test_it_continues_the_most_recent_occurrence() -> None:
    assert propose(build(), {0: [1, 2, 7, 1, 2, 8, 5, 1, 2]}) == [[8, 5, 1]]


def test_the_longest_suffix_goes_first() -> None:
    tokens = [3, 1, 2, 7, 7, 4, 1, 2, 8, 8, 3, 1, 2]
    assert propose(build(), {0: tokens}) == [[7, 7, 4]]
    assert propose(build(min_n=2, max_n=2), {0: tokens}) == [[8, 8, 3]]


def test_nothing_is_proposed_where_nothing_repeats() -> None:
    assert propose(build(), {0: [1, 2, 3, 4], 1: [5], 2: []}) == [[], [], []]


def test_single_tokens_count_only_when_asked_for() -> None:
    assert propose(build(), {0: [1, 2, 3, 1]}) == [[]]
    assert propose(build(min_n=1), {0: [1, 2, 3, 1]}) == [[2, 3, 1]]


def test_limits_cut_each_row() -> None:
    tokens = [1, 2, 7, 8, 9, 1, 2]
    assert propose(build(), {0: tokens, 1: tokens, 2: tokens}, [0, 1, 2]) == [[], [7], [7, 8]]


def test_a_reused_slot_forgets_what_was_there() -> None:
    drafter = build()
    assert propose(drafter, {0: [1, 2, 7, 8, 1, 2]}) == [[7, 8, 1]]
    drafter.forget([0])
    assert propose(drafter, {0: [5, 6, 1, 2]}) == [[]]


@pytest.mark.parametrize(
    "other",
    [[5, 6, 1, 2], [5, 2, 7, 8, 1, 2, 1, 2, 3], [1, 2, 7, 8, 9, 9, 9, 9, 1, 2], [1, 2]],
    ids=["shorter", "other start", "other middle", "a prefix"],
)
def test_another_sequence_in_a_slot_is_noticed_without_being_told(other: list[int]) -> None:
    drafter = build()
    propose(drafter, {0: [1, 2, 7, 8, 1, 2]})
    assert propose(drafter, {0: other}) == [brute_force(other, 2, 4, 3)]


tokens_of = st.lists(st.integers(0, 2), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=9)), max_size=14),
    shortest=st.integers(1, 3),
    extra=st.integers(0, 3),
    count=st.integers(1, 5),
)
def test_growing_sequences_give_what_a_scan_gives(
    pieces: list[tuple[int, list[int]]], shortest: int, extra: int, count: int
) -> None:
    drafter = build(count, min_n=shortest, max_n=shortest + extra)
    sequences: dict[int, list[int]] = {}
    for slot, piece in pieces:
        sequences.setdefault(slot, []).extend(piece)
        del sequences[slot][MAX_LENGTH:]
        expected = [brute_force(tokens, shortest, shortest + extra, count) for tokens in sequences.values()]
        assert propose(drafter, dict(sequences)) == expected


@settings(max_examples=150, deadline=None)
@given(first=tokens_of, second=tokens_of)
def test_a_match_is_always_a_real_one(first: list[int], second: list[int]) -> None:
    """A slot that changes hands untold may lose matches, but never proposes what did not follow a real one."""
    drafter = build(2, min_n=2, max_n=3)
    propose(drafter, {0: first})
    (drafts,) = propose(drafter, {0: second})
    continuations = [
        continued(second, end, 2)
        for size in (2, 3)
        for end in range(size, len(second))
        if second[end - size : end] == second[len(second) - size :]
    ]
    assert not drafts or drafts in continuations


@pytest.mark.parametrize(("low", "high"), [(0, 4), (5, 4), (-1, 2)])
def test_sizes_that_make_no_sense_are_refused(low: int, high: int) -> None:
    with pytest.raises(ConfigError) as caught:
        build(min_n=low, max_n=high)
    assert caught.value.field == "plugins.options.ngram.min_n"
    assert caught.value.value == low
    assert caught.value.message == f"min_n must be from 1 to max_n = {high}"


def test_a_step_reads_only_what_is_new() -> None:
    drafter = build()
    tokens = np.random.default_rng(0).integers(0, 9, MAX_LENGTH).tolist()
    propose(drafter, {0: tokens[:100]})
    before = len(drafter._index._slots[0].ends)
    propose(drafter, {0: tokens[:101]})
    assert len(drafter._index._slots[0].ends) - before <= 3, "one token adds one n-gram of each size"


def test_the_light_module_imports_neither_numpy_nor_torch() -> None:
    code = (
        "import sys; before = set(sys.modules); import jackfield_spec_decode.ngram; "
        "print(sorted({'numpy', 'torch'} & (set(sys.modules) - before)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
