from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.kv_cache import BlockHasher

tokens_of = st.lists(st.integers(0, 3), max_size=20)


def hashes(tokens: list[int], size: int = 3, **of: Any) -> list[bytes]:
    hasher = BlockHasher(size, **of)
    hasher.extend(np.array(tokens, dtype=np.int32))
    return hasher.hashes


@settings(max_examples=200)
@given(first=tokens_of, second=tokens_of, size=st.integers(1, 4))
def test_hashes_are_equal_exactly_where_prefixes_are(first: list[int], second: list[int], size: int) -> None:
    one, two = hashes(first, size), hashes(second, size)
    assert (len(one), len(two)) == (len(first) // size, len(second) // size)
    for i, a in enumerate(one):
        for j, b in enumerate(two):
            same = first[: (i + 1) * size] == second[: (j + 1) * size]
            assert (a == b) == same


@given(tokens=tokens_of, cuts=st.lists(st.integers(0, 20), max_size=4))
def test_growing_gives_what_hashing_at_once_gives(tokens: list[int], cuts: list[int]) -> None:
    hasher = BlockHasher(3)
    for cut in [*sorted(cuts), len(tokens)]:
        hasher.extend(np.array(tokens[:cut], dtype=np.int64))
    assert hasher.hashes == hashes(tokens)


def test_salts_and_adapters_separate() -> None:
    tokens = [1, 2, 3, 4, 5, 6]
    salts: list[dict[str, Any]] = [{}, {"salt": "a"}, {"salt": "b"}, {"salt": "', '"}]
    owners = [*salts, {"adapter": "a"}, {"salt": "a", "adapter": "a"}]
    first = [tuple(hashes(tokens, **owner)) for owner in owners]
    assert len(set(first)) == len(owners)
    assert not set(first[0]) & set(first[1])


def test_features_separate_from_their_block_on() -> None:
    tokens = list(range(9))
    plain = hashes(tokens)
    image = hashes(tokens, features=((4, b"cat"),))
    assert image[0] == plain[0]
    assert image[1] != plain[1] and image[2] != plain[2]
    assert hashes(tokens, features=((4, b"dog"),))[1] != image[1]
    assert hashes(tokens, features=((5, b"cat"),))[1] != image[1]
    assert hashes(tokens, features=((4, b"cat"),)) == image
