"""A sampler over a few slots, and scalar references in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jackfield.protocol import NewSequence, SamplingParams
from jackfield.sampling import Sampler, SamplingState
from jackfield.sampling.sampler import SampleRows

Floats = npt.NDArray[np.float64]
DEVICE = torch.device("cpu")


class World:
    """Sequences by slot, each with its tokens, its parameters and its seed."""

    def __init__(self, slots: int = 8, length: int = 64) -> None:
        self.state = SamplingState(slots, DEVICE)
        self.sampler = Sampler(self.state)
        self.tokens = torch.zeros((slots, length), dtype=torch.int32)
        self.lengths = np.zeros(slots, dtype=np.int32)

    def add(
        self,
        slot: int,
        params: SamplingParams,
        *,
        seed: int = 0,
        prompt: Sequence[int] = (0,),
        output: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
        bad_words: Sequence[list[int]] = (),
    ) -> None:
        tokens = np.array([*prompt, *output], dtype=np.int32)
        self.tokens[slot, : len(tokens)] = torch.from_numpy(tokens)
        self.lengths[slot] = len(tokens)
        new = NewSequence(slot, f"r{slot}", tokens, len(prompt), params, stop_ids, seed, bad_words=bad_words)
        self.state.fill([new])

    def rows(self, slots: Sequence[int], lengths: Sequence[int] | None = None) -> SampleRows:
        host = np.array(slots, dtype=np.int32)
        known = self.lengths[host] if lengths is None else np.array(lengths, dtype=np.int32)
        return SampleRows(host, torch.from_numpy(host.astype(np.int64)), known, self.tokens)

    def sample(self, logits: torch.Tensor, slots: Sequence[int], lengths: Sequence[int] | None = None) -> list[int]:
        ids, _ = self.sampler.sample(logits, self.rows(slots, lengths))
        return ids.tolist()


def softmax(logits: Sequence[float] | Floats) -> Floats:
    values = np.asarray(logits, dtype=np.float64)
    weights = np.exp(values - values.max())
    return np.asarray(weights / weights.sum())


def filtered(
    logits: Sequence[float], temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> Floats:
    """Return the distribution that the parameters describe, token by token, in the documented order."""
    p = softmax(np.asarray(logits, dtype=np.float64) / temperature)
    p = np.where(p < min_p * p.max(), 0.0, p)
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if top_k:
        p[order[top_k:]] = 0.0
    p /= p.sum()
    mass = 0.0
    for token in order:
        if mass >= top_p:
            p[token] = 0.0
        mass += p[token]
    return np.asarray(p / p.sum())


def chi_square(counts: npt.NDArray[np.int64], expected: Floats) -> tuple[float, float]:
    """Return the statistic over the tokens that can occur, and its 99.997 % quantile (Wilson and Hilferty 1931)."""
    support = expected > 0
    draws = counts.sum()
    statistic = float((((counts - draws * expected) ** 2)[support] / (draws * expected[support])).sum())
    freedom = int(support.sum()) - 1
    if freedom == 0:
        return statistic, 1e-9
    third = 2 / (9 * freedom)
    return statistic, freedom * (1 - third + 4.0 * math.sqrt(third)) ** 3


def penalized(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Apply the penalties one token at a time (repetition: arXiv:1909.05858)."""
    out = [float(x) for x in logits]
    for token in set(prompt) | set(output):
        rate = params.repetition_penalty
        out[token] = out[token] / rate if out[token] > 0 else out[token] * rate
    for token in set(output):
        out[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    return out


def params(**values: Any) -> SamplingParams:
    """Return parameters; a shorthand."""
    return SamplingParams(**values)


Values = Mapping[str, Any]
