"""Pooler: from final hidden states to one result per prompt. Prompts may come in chunks.

Legend: T tokens of a step, E width, L labels, N tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import PoolerConfig
from jackfield.protocol import NewSequence, PooledResult, PoolingParams, SchedulerOutput

Classify = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [R, E] to scores [R, L]."""


@dataclass(slots=True)
class _Prompt:
    params: PoolingParams
    seen: int = 0
    total_E: torch.Tensor | None = None
    kept: list[torch.Tensor] = field(default_factory=list)


class Pooler:
    """Carries what chunks of prompts add up to.

    Args:
        config: how the model was trained. classify: scores of labels, or None where the model has no such head.
    """

    def __init__(self, config: PoolerConfig, classify: Classify | None) -> None:
        self._config = config
        self._classify = classify
        self._prompts: dict[int, _Prompt] = {}

    def fill(self, new: Sequence[NewSequence]) -> None:
        """Begin prompts."""
        for one in new:
            assert one.pooling is not None, "a request that generates came to a pooling engine"
            self._prompts[one.slot] = _Prompt(one.pooling)

    def step(
        self, plan: SchedulerOutput, hidden_TE: torch.Tensor, ends: npt.NDArray[np.int64]
    ) -> dict[int, torch.Tensor]:
        """Take the hidden states of a step; return the float32 results of prompts that end in it, by slot.

        Args:
            ends: [B] index after each sequence's last token.
        """
        done: dict[int, torch.Tensor] = {}
        rows = zip(plan.slots.tolist(), plan.counts.tolist(), ends.tolist(), plan.samples.tolist(), strict=True)
        for slot, count, end, last in rows:
            prompt = self._prompts[slot]
            self._take(prompt, hidden_TE[end - count : end])
            if last:
                done[slot] = self._result(prompt)
                del self._prompts[slot]
        return done

    def _take(self, prompt: _Prompt, chunk_NE: torch.Tensor) -> None:
        method = self._method(prompt.params)
        if method == "all":
            prompt.kept.append(chunk_NE)
        elif method == "mean":
            part = chunk_NE.sum(0, dtype=torch.float32)
            prompt.total_E = part if prompt.total_E is None else prompt.total_E + part
        elif method == "last" or not prompt.seen:
            prompt.kept = [chunk_NE[-1:] if method == "last" else chunk_NE[:1]]
        prompt.seen += len(chunk_NE)

    def _method(self, params: PoolingParams) -> str:
        return "all" if params.per_token else params.method or self._config.method

    def _result(self, prompt: _Prompt) -> torch.Tensor:
        params = prompt.params
        if prompt.total_E is not None:
            hidden = prompt.total_E / prompt.seen
        else:
            hidden = torch.cat(prompt.kept)
            hidden = hidden if params.per_token else hidden[0]
        if params.makes_embeddings:
            return self._embedding(hidden, params)
        assert self._classify is not None, "the input processor refuses labels of models that have none"
        scores = self._classify(hidden.reshape(-1, hidden.shape[-1]))
        scores = scores.float().view(*hidden.shape[:-1], -1)
        return _probabilities(scores, self._config.activation) if params.activation else scores

    def _embedding(self, hidden: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        vector = hidden.float()[..., : params.dimensions]
        normalize = self._config.normalize if params.normalize is None else params.normalize
        return torch.nn.functional.normalize(vector, dim=-1) if normalize else vector


def _probabilities(scores: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "softmax":
        return scores.softmax(-1)
    return scores.sigmoid() if activation == "sigmoid" else scores


def split_results(shapes: Mapping[int, torch.Tensor], flat: npt.NDArray[np.float32]) -> dict[int, PooledResult]:
    """Return the results by slot out of all their numbers, one after another."""
    results, at = {}, 0
    for slot, tensor in shapes.items():
        count = tensor.numel()
        results[slot] = PooledResult(flat[at : at + count].astype("<f4").tobytes(), list(tensor.shape))
        at += count
    return results
