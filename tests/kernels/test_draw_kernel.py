"""Drawing tokens without a sort: distributions, filters, ties; in the interpreter with few draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from draw_world import batch_of, chi_square, distribution

from jackfield.protocol import SamplingParams
from jackfield_ops.triton_draw import draw_tokens

# The interpreter computes with numpy, which warns where numbers of 32 bits go round.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:divide by zero", "ignore:invalid value")
LOGITS = [0.5, 2.0, 1.5, 1.5, -1.0, 2.0, 1.5, -4.0, 0.0, 1.0]
"""With ties inside and at the borders of the filters below."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_k cuts a tie": {"top_k": 4},
    "top_k of all": {"top_k": 10},
    "top_p": {"top_p": 0.6},
    "top_p cuts a tie": {"top_p": 0.7},
    "tiny top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.5},
    "all": {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.1},
    "top_p inside a tie of top_k": {"top_k": 4, "top_p": 0.99},
    "greedy": {"temperature": 0.0},
}


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_distribution(case: str) -> None:
    params = SamplingParams(max_tokens=None, **CASES[case])
    logits = torch.tensor(LOGITS).expand(40, -1)
    ids = draw_tokens(logits, batch_of([params], [0] * 40, "cpu")).tolist()
    statistic, limit = chi_square(ids, distribution(LOGITS, params))
    assert statistic < limit


def test_rows_are_on_their_own() -> None:
    params = [SamplingParams(max_tokens=None, **values) for values in CASES.values()]
    slots = list(range(len(params))) * 3
    rows = torch.randn(len(slots), 37, generator=torch.Generator().manual_seed(1))
    batch = batch_of(params, slots, "cpu")
    together = draw_tokens(rows, batch)
    for at in range(0, len(slots), 9):
        alone = batch_of(params, [slots[at]], "cpu")
        alone.positions[:] = batch.positions[at]
        assert draw_tokens(rows[at : at + 1], alone).tolist() == [int(together[at])]


def test_rows_longer_than_a_block_in_narrow_types() -> None:
    """Logits of 16 bits are full of ties, and the first of them count."""
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(3)).half()
    for values in ({"top_k": 7}, {"top_p": 0.01}, {"top_k": 40, "top_p": 0.5}):
        params = SamplingParams(max_tokens=None, **values)  # type: ignore[arg-type]
        kept = np.flatnonzero(distribution(logits[0].float().tolist(), params))
        ids = draw_tokens(logits.expand(12, -1), batch_of([params], [0] * 12, "cpu"))
        assert set(ids.tolist()) <= set(kept.tolist())
        assert len(set(ids.tolist())) >= min(3, len(kept) // 2)


def test_infinite_and_missing_numbers() -> None:
    params = [SamplingParams(max_tokens=None), SamplingParams(top_k=2, max_tokens=None)]
    odd = [float("-inf"), 1.0, float("-inf"), float("-inf")]
    rows = torch.tensor([odd, odd, [float("nan")] * 4, [float("-inf")] * 4])
    ids = draw_tokens(rows, batch_of(params, [0, 1, 0, 1], "cpu")).tolist()
    assert ids[:2] == [1, 1] and all(0 <= i < 4 for i in ids)


def test_strided_rows_are_read_as_they_are() -> None:
    wide = torch.randn(4, 90, generator=torch.Generator().manual_seed(5))
    part = wide[:, 20:60]
    batch = batch_of([SamplingParams(top_p=0.9, max_tokens=None)], [0] * 4, "cpu")
    assert torch.equal(draw_tokens(part, batch), draw_tokens(part.contiguous(), batch))
    assert draw_tokens(part[:0], batch_of([SamplingParams()], [], "cpu")).shape == (0,)
