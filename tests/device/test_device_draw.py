"""Drawing tokens on the device: distributions over many draws, large vocabularies, agreement with the interpreter's
reference on what the filters keep.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from draw_world import batch_of, chi_square, distribution
from test_draw_kernel import CASES, LOGITS

from jackfield.protocol import SamplingParams
from jackfield_ops.triton_draw import draw_tokens

pytestmark = pytest.mark.gpu
DRAWS = 100_000


@pytest.mark.parametrize("case", CASES)
def test_a_hundred_thousand_draws(case: str) -> None:
    params = SamplingParams(max_tokens=None, **CASES[case])
    logits = torch.tensor(LOGITS, device="cuda").expand(DRAWS, -1)
    ids = draw_tokens(logits, batch_of([params], [0] * DRAWS, "cuda")).tolist()
    statistic, limit = chi_square(ids, distribution(LOGITS, params))
    assert statistic < limit


def test_seeds_draw_apart_and_positions_too() -> None:
    params = SamplingParams(max_tokens=None)
    logits = torch.zeros(50_000, 64, device="cuda")
    first, again, other = (
        draw_tokens(logits, batch_of([params], [0] * 50_000, "cuda", seed=seed)).cpu().numpy() for seed in (7, 7, 8)
    )
    assert np.array_equal(first, again)
    for numbers in (first, (first - other) % 64, (first[1:] - first[:-1]) % 64):
        statistic, limit = chi_square(numbers.tolist(), np.full(64, 1 / 64))
        assert statistic < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "values", [{"top_k": 50}, {"top_p": 0.9}, {"top_k": 1000, "top_p": 0.3}, {"min_p": 0.3}], ids=str
)
def test_large_vocabularies(values: dict[str, Any], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    row = (torch.randn(151_936, generator=generator) * 2.5).to(dtype)
    params = SamplingParams(max_tokens=None, **values)
    wanted = distribution(row.float().tolist(), params)
    # Borders lie where sums of float32 and float64 differ: tokens near one may be on either side.
    loose = distribution(
        row.float().tolist(), SamplingParams(max_tokens=None, **{**values, "top_p": min(1.0, params.top_p + 1e-3)})
    )
    ids = draw_tokens(row.cuda().expand(4000, -1), batch_of([params], [0] * 4000, "cuda")).cpu().numpy()
    assert not (loose[ids] == 0).any()
    best = np.argsort(-wanted)[:20]
    seen = np.array([(ids == token).sum() for token in best])
    expected = wanted[best] * len(ids)
    assert (np.abs(seen - expected) < 6 * np.sqrt(expected + 1)).all()


def test_rows_do_not_depend_on_their_batch() -> None:
    params = [SamplingParams(max_tokens=None, **values) for values in CASES.values()]
    slots = [i % len(params) for i in range(96)]
    rows = torch.randn(96, 32_000, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    batch = batch_of(params, slots, "cuda")
    together = draw_tokens(rows, batch)
    for at in range(0, 96, 7):
        alone = batch_of(params, [slots[at]], "cuda")
        alone.positions[:] = batch.positions[at]
        assert draw_tokens(rows[at : at + 1], alone).tolist() == [int(together[at])]
