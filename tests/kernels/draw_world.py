"""Rows that sample, on any device, and the distribution that each should follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from jackfield.interfaces import DrawBatch
from jackfield.protocol import NewSequence, SamplingParams
from jackfield.sampling import SamplingState

Floats = np.ndarray[Any, np.dtype[np.float64]]


def batch_of(params: Sequence[SamplingParams], slots: Sequence[int], device: str, *, seed: int = 0) -> DrawBatch:
    """Return a batch of one row for each of ``slots``, at positions that count up; slot i has ``params[i]``."""
    state = SamplingState(len(params), torch.device(device))
    prompt = np.zeros(1, dtype=np.int32)
    state.fill([NewSequence(i, str(i), prompt, 1, one, (), seed=seed + i) for i, one in enumerate(params)])
    host = np.array(slots, dtype=np.int32)
    return state.batch(host, torch.from_numpy(host.astype(np.int64)).to(device), np.arange(len(host), dtype=np.int32))


def distribution(logits: Sequence[float], params: SamplingParams) -> Floats:
    """Return the probabilities that the parameters describe, token by token in float64."""
    values = np.asarray(logits, dtype=np.float64)
    if params.is_greedy:
        return np.eye(len(values))[int(np.argmax(values))]
    weights = np.exp((values - values.max()) / params.temperature)
    weights[weights < params.min_p] = 0.0
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if params.top_k:
        weights[order[params.top_k :]] = 0.0
    before, limit = 0.0, params.top_p * weights.sum()
    for token in order:
        share = weights[token]
        if before >= limit:
            weights[token] = 0.0
        before += share
    return np.asarray(weights / weights.sum())


def chi_square(ids: Sequence[int], wanted: Floats) -> tuple[float, float]:
    """Return the statistic and a limit that it exceeds once in millions of times."""
    counts = np.bincount(ids, minlength=len(wanted))
    assert not counts[wanted == 0].any(), "a token was drawn that is filtered out"
    expected = wanted[wanted > 0] * len(ids)
    freedom = len(expected) - 1
    statistic = float(((counts[wanted > 0] - expected) ** 2 / expected).sum())
    return statistic, freedom + 5 * np.sqrt(2 * freedom) + 10
