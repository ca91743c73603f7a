"""Sampler: logits to tokens for all rows of a step at once.

Order of operations: edits (see ``edits``) → plugged processors → temperature → min_p → top_k → top_p → draw. Greedy
rows take the largest edited logit. A draw inverts the cumulative distribution at one uniform number that depends on the
request's seed and the token's position alone, so batch mates change nothing.

Legend: R rows, V vocabulary, N candidates left after top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from jackfield.protocol.requests import TokenLogprobs
from jackfield.sampling.candidates import largest
from jackfield.sampling.edits import edit_row
from jackfield.sampling.logprobs import token_logprobs
from jackfield.sampling.processed import processed_logits
from jackfield.sampling.processors import Processors, apply_processors
from jackfield.sampling.random import uniform
from jackfield.sampling.state import SamplingState

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]

TOP_K_LIMIT = 1024
"""Up to this many candidates a partial selection is cheaper than a sort."""


@dataclass(slots=True)
class SampleRows:
    """The rows of a step that sample.

    Args:
        slots: [R] on the host. slots_device: [R] int64. lengths: [R] tokens each sequence has before the sampled one
            (drafts before it included).
        tokens: [slots, length] token table on the device.
    """

    slots: npt.NDArray[np.int32]
    slots_device: torch.Tensor
    lengths: npt.NDArray[np.int32]
    tokens: torch.Tensor


class Sampler:
    """Samples by the parameters in a :class:`SamplingState`.

    Args:
        processors: plugged logits processors by name, in the order in which they are applied. mode: what log
            probabilities are of: ``raw_`` (the model's) or ``processed_`` (those drawn from), ``logprobs`` or
            ``logits``.
    """

    def __init__(
        self, state: SamplingState, processors: Processors | None = None, mode: LogprobsMode = "raw_logprobs"
    ) -> None:
        self._state = state
        self._processors = processors or {}
        self.shows_processed = mode.startswith("processed")
        self.as_logits = mode.endswith("logits")

    def sample(self, logits_RV: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        """Return [R] sampled ids (int64). ``logits`` may be changed."""
        state = self._state
        if state.edits[rows.slots].any():
            logits_RV = self._edit(logits_RV, rows)
        greedy = state.greedy[rows.slots]
        if greedy.all():
            return logits_RV.argmax(-1)
        if not greedy.any():
            return self._draw(logits_RV, rows, np.arange(len(greedy)))
        ids = logits_RV.argmax(-1)
        drawn = np.flatnonzero(~greedy)
        ids[torch.from_numpy(drawn).to(ids.device)] = self._draw(logits_RV, rows, drawn)
        return ids

    def logprobs(
        self, logits_RV: torch.Tensor, ids_R: torch.Tensor, slots: npt.NDArray[np.int32]
    ) -> list[TokenLogprobs | None] | None:
        """Return log probabilities of the chosen tokens for rows that asked, or None when none did.

        Args:
            logits_RV: the model's own (before any edit); where processed ones are wanted, those after :meth:`sample`.
        """
        wanted = self._state.logprobs[slots]
        asking = np.flatnonzero(wanted > -2)
        if not len(asking):
            return None
        index = torch.from_numpy(asking).to(logits_RV.device)
        asked = logits_RV[index]
        if self.shows_processed:
            asked = self._processed(asked, slots[asking])
        entries = token_logprobs(asked, ids_R[index], wanted[asking], as_logits=self.as_logits)
        out: list[TokenLogprobs | None] = [None] * len(slots)
        for row, entry in zip(asking.tolist(), entries, strict=True):
            out[row] = entry
        return out

    def _processed(self, logits_RV: torch.Tensor, slots: npt.NDArray[np.int32]) -> torch.Tensor:
        state = self._state

        def send(values: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(values[slots]).to(logits_RV.device)

        return processed_logits(
            logits_RV,
            temperature_R=send(state.host["temperature"]),
            min_p_R=send(state.host["min_p"]),
            top_k_R=send(state.host_top_k),
            top_p_R=send(state.host["top_p"]),
            greedy_R=send(state.greedy),
        )

    def _edit(self, logits_RV: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        state = self._state
        for row in np.flatnonzero(state.edits[rows.slots]).tolist():
            slot = int(rows.slots[row])
            edit_row(logits_RV[row], state.extras[slot], rows.tokens[slot, : int(rows.lengths[row])])
        apply_processors(self._processors, state, logits_RV, rows.slots, rows.lengths, rows.tokens)
        return logits_RV

    def _draw(self, logits_RV: torch.Tensor, rows: SampleRows, which: npt.NDArray[Any]) -> torch.Tensor:
        """Return sampled ids of the rows ``which``, handled by the cheapest way that each allows."""
        state = self._state
        slots = rows.slots[which]
        top_k, top_p = state.host_top_k[slots], state.host["top_p"][slots]
        # To keep everything is to keep nothing apart: the same draw as without top_k.
        top_k = np.where(top_k < logits_RV.shape[1], top_k, 0)
        narrow = (top_k > 0) & (top_k <= TOP_K_LIMIT)
        sort = ~narrow & ((top_p < 1.0) | (top_k > 0))
        ids = torch.empty(len(which), dtype=torch.int64, device=logits_RV.device)
        for kind, mask in (("narrow", narrow), ("sort", sort), ("plain", ~narrow & ~sort)):
            part = np.flatnonzero(mask)
            if len(part):
                chosen = which[part]
                ids[torch.from_numpy(part).to(ids.device)] = self._draw_class(kind, logits_RV, rows, chosen)
        return ids

    def _draw_class(
        self, kind: str, logits_RV: torch.Tensor, rows: SampleRows, which: npt.NDArray[Any]
    ) -> torch.Tensor:
        state = self._state
        index = torch.from_numpy(which).to(logits_RV.device)
        slots = rows.slots_device[index]
        scaled = logits_RV[index].float() / state.numbers["temperature"][slots].unsqueeze(-1)
        # The bound keeps a row in which nothing is allowed free of NaN: all its weights become zero.
        scaled = scaled - scaled.amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).min)
        weights = scaled.exp()
        min_p = state.numbers["min_p"][slots].unsqueeze(-1)
        if state.host["min_p"][rows.slots[which]].any():
            weights = weights.masked_fill(weights < min_p, 0.0)
        order = None
        if kind != "plain":
            weights, order = self._filtered(kind, weights, slots, state.host_top_k[rows.slots[which]])
        lengths = torch.from_numpy(rows.lengths[which].astype(np.int64)).to(logits_RV.device)
        picked = _invert(weights, uniform(state.seeds[slots], lengths))
        return picked if order is None else order.gather(1, picked.unsqueeze(-1)).squeeze(-1)

    def _filtered(
        self, kind: str, weights_RV: torch.Tensor, slots: torch.Tensor, host_top_k: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights in descending order with top-k and top-p applied, and the ids they belong to."""
        state = self._state
        top_k = state.top_k[slots].unsqueeze(-1)
        if kind == "narrow":
            weights, order = largest(weights_RV, top_k, int(host_top_k.max()))
        else:
            weights, order = weights_RV.sort(dim=-1, descending=True, stable=True)
        place = torch.arange(weights.shape[1], device=weights.device)
        weights = weights.masked_fill((place >= top_k) & (top_k > 0), 0.0)
        if (state.numbers["top_p"][slots] < 1.0).any():
            share = weights.double().cumsum(-1)
            before = share - weights
            limit = state.numbers["top_p"][slots].double().unsqueeze(-1) * share[:, -1:]
            weights = weights.masked_fill(before >= limit, 0.0)
        return weights, order


def _invert(weights_RN: torch.Tensor, u_R: torch.Tensor) -> torch.Tensor:
    """Return the first index at which the cumulative weight exceeds ``u`` times the total; weight-zero entries are
    never returned.
    """
    share = weights_RN.double().cumsum(-1)
    target = (u_R * share[:, -1]).unsqueeze(-1)
    picked = torch.searchsorted(share, target, right=True).squeeze(-1)
    # u * total can round up to the total; the last entry that has weight is the first that reaches it.
    last = torch.searchsorted(share, share[:, -1:].contiguous()).squeeze(-1)
    # A row of NaN has no such place; any id is better than one that is none.
    return torch.minimum(picked, last).clamp_max_(weights_RN.shape[1] - 1)
