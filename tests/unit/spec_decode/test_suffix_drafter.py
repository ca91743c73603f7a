"""Drafts are what a scan of all texts gives, and memory is bounded."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.errors import ConfigError
from jackfield.interfaces import DraftBatch, DrafterEnv, DrafterRequest, Settings
from jackfield_spec_decode.suffix import SuffixDrafter
from jackfield_spec_decode.suffix_tree import Node, SuffixTree

MAX_LENGTH = 160


def build(num_tokens: int = 4, **options: Any) -> SuffixDrafter:
    request = DrafterRequest(num_tokens=num_tokens)
    return SuffixDrafter.build(DrafterEnv(request, 4, MAX_LENGTH, settings=Settings(options)))


def propose(drafter: SuffixDrafter, sequences: dict[int, Sequence[int]], limit: int = MAX_LENGTH) -> list[list[int]]:
    table = np.full((4, MAX_LENGTH), 99, dtype=np.int32)
    for slot, tokens in sequences.items():
        table[slot, : len(tokens)] = tokens
    slots = np.array(list(sequences), dtype=np.int32)
    lengths = np.array([len(tokens) for tokens in sequences.values()], dtype=np.int32)
    ids = np.asarray(drafter.propose(DraftBatch(slots, table, lengths, np.full(len(slots), limit))).ids)
    assert ids.shape == (len(slots), drafter._index._width)
    return [[token for token in row if token >= 0] for row in ids.tolist()]


def follow(
    texts: Sequence[Sequence[int]], run: Sequence[int], limit: int, floor: float, own: bool
) -> tuple[Any, float]:
    """Scan: the most frequent tokens behind all places where ``run`` occurs."""
    size = len(run)
    places = [
        (number, end)
        for number, text in enumerate(texts)
        for end in range(size, len(text) + 1)
        if list(text[end - size : end]) == list(run)
    ]
    if len(places) < 1 + own:
        return [], 0.0
    path: list[int] = []
    share, score = 1.0, 0.0
    while len(path) < limit:
        step = len(path)
        known = [(n, end, texts[n][end + step]) for n, end in places if end + step < len(texts[n])]
        if known:
            counts = Counter(token for _, _, token in known)
            latest = {token: at for at, (_, _, token) in enumerate(known)}
            token = max(counts, key=lambda t: (counts[t], latest[t]))
            share *= counts[token] / len(known) if len(places) > 1 else 1.0
            places = [(n, end) for n, end, t in known if t == token]
        elif own and len(places) == 1 and step:
            token = path[places[0][1] + step - len(texts[0])]
        else:
            break
        if share < floor:
            break
        path.append(token)
        score += share
    return path, score


def scan(
    text: Sequence[int], answers: Sequence[Sequence[int]], width: int, depth: int, factor: float, floor: float
) -> list[int]:
    best: list[int] = []
    most = 0.0
    for texts, own in (([text], True), (answers, False)):
        for size in range(min(depth - 1, len(text)), 0, -1):
            limit = min(width, int(factor * size), depth - size)
            path, score = follow(texts, text[len(text) - size :], limit, floor, own)
            if score > most:
                best, most = path, score
    return best


def test_it_goes_on_as_the_longest_match_did() -> None:
    assert propose(build(), {0: [1, 2, 3, 7, 8, 9, 5, 1, 2, 3]}) == [[7, 8, 9]]


def test_the_most_frequent_continuation_goes_first_and_the_latest_of_equal_ones() -> None:
    text = [1, 2, 5, 5, 1, 2, 6, 6, 1, 2, 5, 4, 1, 2]
    assert propose(build(num_tokens=1), {0: text}) == [[5]]
    assert propose(build(num_tokens=1), {0: [1, 2, 5, 1, 2, 6, 1, 2]}) == [[6]]


def test_a_draft_ends_where_it_is_not_sure() -> None:
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6, 9, 1, 2]
    assert propose(build(min_token_prob=0.5), {0: text}) == [[3]]
    assert len(propose(build(min_token_prob=0.2), {0: text})[0]) == 2


def test_answers_of_others_are_remembered_and_may_be_kept_out() -> None:
    for options, expected in (({}, [3, 4]), ({"max_cached_requests": 0}, [])):
        drafter = build(**options)
        propose(drafter, {0: [8, 1]})
        propose(drafter, {0: [8, 1, 2, 3, 4, 5]})
        drafter.forget([0])
        assert propose(drafter, {1: [7, 1, 2]}) == [expected]
        assert propose(drafter, {2: [8]}) == [[]], "a prompt is not an answer"


def test_a_loop_goes_on_past_the_end_of_the_text() -> None:
    assert propose(build(num_tokens=7), {0: [1, 2, 3] * 3}) == [[1, 2, 3, 1, 2, 3]]


def test_limits_cut() -> None:
    assert propose(build(), {0: [1, 2, 3, 7, 8, 9, 5, 1, 2, 3]}, limit=2) == [[7, 8]]
    assert propose(build(), {0: [1, 2, 3, 7, 8, 9, 5, 1, 2, 3]}, limit=0) == [[]]


words = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    texts=st.lists(st.tuples(words, words), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    width=st.integers(1, 6),
    depth=st.integers(2, 9),
    factor=st.sampled_from([0.5, 1.0, 2.0]),
    floor=st.sampled_from([0.0, 0.1, 0.34, 0.6]),
    kept=st.integers(0, 3),
)
def test_growing_sequences_and_ending_ones_give_what_a_scan_gives(
    texts: list[tuple[list[int], list[int]]],
    cuts: list[int],
    width: int,
    depth: int,
    factor: float,
    floor: float,
    kept: int,
) -> None:
    drafter = build(width, max_tree_depth=depth, max_spec_factor=factor, min_token_prob=floor, max_cached_requests=kept)
    answers: list[list[int]] = []
    for prompt, answer in texts:
        length, turn = len(prompt) + 1, 0
        whole = [*prompt, *answer]
        while True:
            said = whole[:length]
            remembered = answers[-kept:] if kept else []
            assert propose(drafter, {1: said}) == [scan(said, remembered, width, depth, factor, floor)]
            if length == len(whole):
                break
            length = min(len(whole), length + cuts[turn % len(cuts)])
            turn += 1
        drafter.forget([1])
        answers.append(answer)


def nodes(tree: SuffixTree) -> int:
    stack: list[Node] = list(tree.runs.values())
    count = 0
    while stack:
        node = stack.pop()
        count += 1
        stack += (node.children or {}).values()
    return count


def test_memory_is_bounded_and_all_of_it_comes_back() -> None:
    drafter = build(max_cached_tokens=300)
    random, common = np.random.default_rng(0), drafter._index._common
    largest = 0
    for _ in range(40):
        text = random.integers(0, 50, 100).tolist()
        propose(drafter, {0: text[:1]})
        propose(drafter, {0: text})
        drafter.forget([0])
        largest = max(largest, nodes(common))
        assert drafter._index._cached <= 300
    assert largest < 3 * 300, "about one node for each token that is remembered"
    assert not drafter._index._slots
    for answer in list(drafter._index._answers):
        common.remove(answer)
    assert nodes(common) == 0


def test_what_is_longer_than_the_memory_is_not_remembered() -> None:
    drafter = build(max_cached_tokens=5)
    propose(drafter, {0: [1]})
    propose(drafter, {0: [1, 2, 3, 4, 5, 6, 7, 8]})
    drafter.forget([0])
    assert drafter._index._cached == 0


def test_another_sequence_in_a_slot_is_noticed() -> None:
    drafter = build()
    propose(drafter, {0: [1, 2, 3, 4, 1, 2]})
    assert propose(drafter, {0: [9, 8, 7, 6, 5, 1, 2]}) == [[]]


@pytest.mark.parametrize(
    ("name", "value", "bounds"),
    [
        ("max_tree_depth", 1, "at least 2"),
        ("max_spec_factor", -0.5, "at least 0"),
        ("min_token_prob", 1.5, "from 0 to 1"),
        ("min_token_prob", -0.1, "from 0 to 1"),
        ("max_cached_requests", -1, "at least 0"),
        ("max_cached_tokens", -1, "at least 0"),
    ],
)
def test_options_out_of_range_are_refused(name: str, value: float, bounds: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be {bounds}") as caught:
        build(**{name: value})
    assert (caught.value.field, caught.value.value) == (f"plugins.options.suffix.{name}", value)


def test_the_light_module_imports_neither_numpy_nor_torch() -> None:
    code = (
        "import sys; before = set(sys.modules); import jackfield_spec_decode.suffix; "
        "print(sorted({'numpy', 'torch'} & (set(sys.modules) - before)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
