"""Processed log probabilities are those of the distribution that tokens are drawn from."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from jackfield import SamplingParams
from jackfield.protocol import NewSequence
from jackfield.sampling import Sampler, SamplingState
from jackfield.sampling.sampler import LogprobsMode, SampleRows

LOGITS = [2.0, 1.5, 1.0, 0.0, -1.0, -3.0]
PLAIN = torch.tensor(LOGITS)


def run(mode: LogprobsMode, params: SamplingParams, draws: int = 1) -> tuple[dict[int, float], Counter[int]]:
    """Return values by token id, and how often each token was drawn."""
    state = SamplingState(draws, torch.device("cpu"))
    prompt = np.zeros(1, dtype=np.int32)
    state.fill([NewSequence(i, str(i), prompt, 1, params, (), seed=i) for i in range(draws)])
    sampler = Sampler(state, mode=mode)
    slots = np.arange(draws, dtype=np.int32)
    tokens = torch.zeros((draws, 4), dtype=torch.int32)
    rows = SampleRows(slots, torch.arange(draws), np.ones(draws, dtype=np.int32), tokens)
    logits = torch.tensor([LOGITS] * draws)
    ids, edited = sampler.sample(logits, rows)
    found = sampler.logprobs(edited if sampler.shows_processed else logits, ids, slots)
    assert found is not None and found[0] is not None
    return dict(zip(found[0].token_ids, found[0].values, strict=True)), Counter(ids.tolist())


CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 2.0},
    "top_k": {"temperature": 0.7, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "all": {"temperature": 1.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "logit_bias": {3: 2.0}},
}


@pytest.mark.parametrize("case", CASES)
def test_they_are_what_is_drawn(case: str) -> None:
    params = SamplingParams(logprobs=-1, max_tokens=None, **CASES[case])
    values, drawn = run("processed_logprobs", params, draws=40_000)
    assert sum(math.exp(value) for value in values.values()) == pytest.approx(1.0, abs=1e-5)
    chi, freedom = 0.0, -1
    for token, value in values.items():
        expected = math.exp(value) * 40_000
        assert expected or not drawn[token], "a token was drawn that is said to be impossible"
        chi += (drawn[token] - expected) ** 2 / expected if expected else 0.0
        freedom += expected > 0
    assert chi < freedom + 5 * math.sqrt(2 * freedom), f"chi-square {chi:.1f} at {freedom} degrees of freedom"


def test_raw_ones_are_the_models() -> None:
    params = SamplingParams(logprobs=-1, **CASES["all"])
    values, _ = run("raw_logprobs", params)
    expected = PLAIN.log_softmax(-1)
    assert [values[i] for i in range(6)] == pytest.approx(expected.tolist(), abs=1e-6)


def test_logits_are_given_as_they_are() -> None:
    params = SamplingParams(logprobs=-1, temperature=2.0, logit_bias={5: 1.0})
    raw, _ = run("raw_logits", params)
    assert [raw[i] for i in range(6)] == pytest.approx(LOGITS)
    processed, _ = run("processed_logits", params)
    assert [processed[i] for i in range(6)] == pytest.approx([x / 2 for x in [*LOGITS[:5], -2.0]])


def test_greedy_rows_have_no_temperature() -> None:
    values, _ = run("processed_logits", SamplingParams(logprobs=-1, temperature=0.0, logit_bias={0: -5.0}))
    assert [values[i] for i in range(6)] == pytest.approx([-3.0, *LOGITS[1:]])
