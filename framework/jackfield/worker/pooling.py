"""Pooler: from final hidden states to one result per prompt. Prompts may come in chunks.

Legend: T tokens of a step, E width, L labels, N tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import PoolerConfig, Projection
from jackfield.protocol import NewSequence, PooledResult, PoolingParams, SchedulerOutput

RowMap = Callable[[torch.Tensor], torch.Tensor]
"""Rows [R, E] to rows [R, D]."""
SCORED_ROWS = 256
"""Rows whose logits are in memory at once."""


@dataclass(frozen=True, slots=True)
class Heads:
    """What a model has behind its hidden states, each None where it has not.

    Args:
        classify: scores of labels. logits: of tokens. project: vectors of tokens. dense: what vectors go through
            besides, in order.
    """

    classify: RowMap | None = None
    logits: RowMap | None = None
    project: RowMap | None = None
    dense: tuple[tuple[Projection, RowMap], ...] = ()

    def of_tokens(self) -> Iterator[RowMap]:
        """Yield what the vector of each token goes through before pooling."""
        if self.project is not None:
            yield self.project
        yield from (apply for one, apply in self.dense if one.per_token)

    def of_vectors(self) -> Iterator[RowMap]:
        """Yield what a pooled vector goes through."""
        yield from (apply for one, apply in self.dense if not one.per_token)


@dataclass(slots=True)
class _Prompt:
    params: PoolingParams
    token_ids: npt.NDArray[np.int32]
    seen: int = 0
    total_E: torch.Tensor | None = None
    kept: list[torch.Tensor] = field(default_factory=list)


class Pooler:
    """Carries what chunks of prompts add up to.

    Args:
        config: how the model was trained. heads: what it has behind its hidden states.
    """

    def __init__(self, config: PoolerConfig, heads: Heads) -> None:
        self._config = config
        self._heads = heads
        self._prompts: dict[int, _Prompt] = {}

    def fill(self, new: Sequence[NewSequence]) -> None:
        """Begin prompts."""
        for one in new:
            assert one.pooling is not None, "a request that generates came to a pooling engine"
            self._prompts[one.slot] = _Prompt(one.pooling, one.token_ids)

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
        begin, prompt.seen = prompt.seen, prompt.seen + len(chunk_NE)
        if prompt.params.makes_embeddings:
            for apply in self._heads.of_tokens():
                chunk_NE = apply(chunk_NE)
        if prompt.params.step_tag_id is not None:
            ids = prompt.token_ids[begin : prompt.seen]
            places = np.flatnonzero(ids == prompt.params.step_tag_id)
            prompt.kept.append(chunk_NE[torch.from_numpy(places).to(chunk_NE.device)])
        elif method == "all":
            prompt.kept.append(chunk_NE)
        elif method == "mean":
            part = chunk_NE.sum(0, dtype=torch.float32)
            prompt.total_E = part if prompt.total_E is None else prompt.total_E + part
        elif method == "last" or not begin:
            prompt.kept = [chunk_NE[-1:] if method == "last" else chunk_NE[:1]]

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
        scores = self._scores(hidden.reshape(-1, hidden.shape[-1]), params.returned_token_ids)
        scores = scores.float().view(*hidden.shape[:-1], scores.shape[-1])
        # Of tokens, one is what comes next.
        activation = self._config.activation if self._config.labels else "softmax"
        return _probabilities(scores, activation) if params.activation else scores

    def _scores(self, hidden_RE: torch.Tensor, labels: list[int] | None) -> torch.Tensor:
        head = self._heads.classify if self._config.labels else self._heads.logits
        assert head is not None, "the input processor refuses labels of models that have none"
        wanted = slice(None) if labels is None else torch.tensor(labels, device=hidden_RE.device)
        parts = [head(rows_RE)[:, wanted] for rows_RE in torch.split(hidden_RE, SCORED_ROWS)]
        return torch.cat(parts)

    def _embedding(self, hidden: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        vector = hidden.float()
        for apply in () if params.per_token else self._heads.of_vectors():
            vector = apply(vector)
        vector = vector[..., : params.dimensions]
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
