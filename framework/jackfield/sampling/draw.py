"""Drawing tokens in torch: the reference of the op ``draw_tokens``.

Order of operations: temperature → min_p → top_k → top_p → draw. A draw inverts the cumulative distribution at one
uniform number that depends on the request's seed and the token's position alone, so batch mates change nothing.

Legend: R rows, V vocabulary, N candidates left after top-k.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import DrawBatch
from jackfield.sampling.candidates import largest
from jackfield.sampling.random import uniform

TOP_K_LIMIT = 1024
"""Up to this many candidates a partial selection is cheaper than a sort."""


def draw_tokens(logits_RV: torch.Tensor, batch: DrawBatch) -> torch.Tensor:
    """Return [R] sampled ids (int64), each row handled by the cheapest way that its parameters allow."""
    greedy = batch.greedy[batch.slots]
    if not greedy.any():
        return _draw(logits_RV, batch, np.arange(len(greedy)))
    ids = logits_RV.argmax(-1)
    drawn = np.flatnonzero(~greedy)
    if len(drawn):
        ids[torch.from_numpy(drawn).to(ids.device)] = _draw(logits_RV, batch, drawn)
    return ids


def _draw(logits_RV: torch.Tensor, batch: DrawBatch, which: npt.NDArray[Any]) -> torch.Tensor:
    """Return sampled ids of the rows ``which``."""
    slots = batch.slots[which]
    top_k, top_p = batch.host_top_k[slots], batch.host["top_p"][slots]
    # To keep everything is to keep nothing apart: the same draw as without top_k.
    top_k = np.where(top_k < logits_RV.shape[1], top_k, 0)
    narrow = (top_k > 0) & (top_k <= TOP_K_LIMIT)
    sort = ~narrow & ((top_p < 1.0) | (top_k > 0))
    ids = torch.empty(len(which), dtype=torch.int64, device=logits_RV.device)
    for kind, mask in (("narrow", narrow), ("sort", sort), ("plain", ~narrow & ~sort)):
        part = np.flatnonzero(mask)
        if len(part):
            ids[torch.from_numpy(part).to(ids.device)] = _draw_class(kind, logits_RV, batch, which[part])
    return ids


def _draw_class(kind: str, logits_RV: torch.Tensor, batch: DrawBatch, which: npt.NDArray[Any]) -> torch.Tensor:
    index = torch.from_numpy(which).to(logits_RV.device)
    slots = batch.slots_device[index]
    scaled = logits_RV[index].float() / batch.numbers["temperature"][slots].unsqueeze(-1)
    # The bound keeps a row in which nothing is allowed free of NaN: all its weights become zero.
    scaled = scaled - scaled.amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).min)
    weights = scaled.exp()
    min_p = batch.numbers["min_p"][slots].unsqueeze(-1)
    if batch.host["min_p"][batch.slots[which]].any():
        weights = weights.masked_fill(weights < min_p, 0.0)
    order = None
    if kind != "plain":
        weights, order = _filtered(kind, weights, batch, slots, batch.host_top_k[batch.slots[which]])
    positions = torch.from_numpy(batch.positions[which].astype(np.int64)).to(logits_RV.device)
    picked = invert(weights, uniform(batch.seeds[slots], positions))
    return picked if order is None else order.gather(1, picked.unsqueeze(-1)).squeeze(-1)


def _filtered(
    kind: str, weights_RV: torch.Tensor, batch: DrawBatch, slots: torch.Tensor, host_top_k: npt.NDArray[np.int64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights in descending order with top-k and top-p applied, and the ids they belong to."""
    top_k = batch.top_k[slots].unsqueeze(-1)
    if kind == "narrow":
        weights, order = largest(weights_RV, top_k, int(host_top_k.max()))
    else:
        weights, order = weights_RV.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(weights.shape[1], device=weights.device)
    weights = weights.masked_fill((place >= top_k) & (top_k > 0), 0.0)
    top_p = batch.numbers["top_p"][slots]
    if (top_p < 1.0).any():
        share = weights.double().cumsum(-1)
        before = share - weights
        limit = top_p.double().unsqueeze(-1) * share[:, -1:]
        weights = weights.masked_fill(before >= limit, 0.0)
    return weights, order


def invert(weights_RN: torch.Tensor, u_R: torch.Tensor) -> torch.Tensor:
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
