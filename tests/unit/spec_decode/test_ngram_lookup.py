"""Prompt lookup on the device finds what the index on the host finds, and what a search by hand finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jackfield_spec_decode.ngram_index import NgramIndex
from jackfield_spec_decode.ngram_lookup import last_matches

WIDTH = 5


def by_hand(text: list[int], shortest: int, longest: int) -> list[int]:
    """Return what followed the last earlier occurrence of the longest suffix that has one."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if size < len(text) and text[end - size : end] == text[len(text) - size :]:
                return [text[end + place % (len(text) - end)] for place in range(WIDTH)]
    return [-1] * WIDTH


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 4), (2, 4), (3, 3)])
@pytest.mark.parametrize("words", [2, 4, 8])
def test_all_three_agree(words: int, shortest: int, longest: int) -> None:
    random = np.random.default_rng(words * 10 + longest)
    lengths = random.integers(1, 40, 60)
    tokens = random.integers(0, words, (60, 48)).astype(np.int32)
    found = last_matches(torch.from_numpy(tokens), torch.from_numpy(lengths), shortest, longest, WIDTH)
    index = NgramIndex(shortest, longest, WIDTH)
    indexed = index.propose(tokens, np.arange(60), lengths, np.full(60, WIDTH))
    wanted = [by_hand(tokens[row, :length].tolist(), shortest, longest) for row, length in enumerate(lengths)]
    assert found.tolist() == wanted == indexed.tolist()
    assert found.dtype == torch.int64
    assert any(row[0] >= 0 for row in wanted) and any(row[0] < 0 for row in wanted)
