"""The largest weights of each row, the same whatever other rows ask for. Legend: R rows, V vocabulary, N candidates."""

from __future__ import annotations

import torch


def largest(weights_RV: torch.Tensor, top_k_R1: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [R, N] in descending order and their ids, N >= ``count``; of equal weights smaller ids go first.

    Logits of narrow types are full of ties, and a partial selection breaks them in an order that depends on N, which
    is the largest ``top_k`` of the batch. So ties are put in order of ids afterwards; one that reaches past the last
    candidate is looked up in the whole row.

    Args:
        weights_RV: not negative. top_k_R1: how many candidates each row will keep. count: the largest of them.
    """
    width = min(count + 1, weights_RV.shape[1])
    weights, ids = weights_RV.topk(width, dim=-1)
    ids, by_id = ids.sort(dim=-1)
    weights, place = weights.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, place)
    border_R1 = weights.gather(1, (top_k_R1 - 1).clamp(0, width - 1))
    open_R = (border_R1 == weights[:, -1:]).squeeze(-1) & (top_k_R1.squeeze(-1) < weights_RV.shape[1])
    rows = torch.nonzero(open_R & (border_R1.squeeze(-1) > 0)).squeeze(-1)
    if len(rows):
        ids[rows] = _first_of_equals(weights_RV[rows], weights[rows], ids[rows], border_R1[rows])
    return weights, ids


def _first_of_equals(
    weights_RV: torch.Tensor, weights_RN: torch.Tensor, ids_RN: torch.Tensor, border_R1: torch.Tensor
) -> torch.Tensor:
    """Return ``ids`` with those of weight ``border`` replaced by the smallest ids of that weight in the row."""
    above_R1 = (weights_RN > border_R1).sum(-1, keepdim=True)
    place_N = torch.arange(weights_RN.shape[1], device=ids_RN.device)
    rank_RV = (weights_RV == border_R1).cumsum(-1)
    nth_RN = (place_N - above_R1 + 1).clamp_min(1)
    return torch.where(place_N >= above_R1, torch.searchsorted(rank_RV, nth_RN), ids_RN)
