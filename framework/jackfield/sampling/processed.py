"""The logits that a token was really drawn from, for requests that want to see them. Legend: R rows, V vocabulary."""

from __future__ import annotations

import torch


def processed_logits(
    logits_RV: torch.Tensor,
    *,
    temperature_R: torch.Tensor,
    min_p_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    greedy_R: torch.Tensor,
) -> torch.Tensor:
    """Return logits with temperature, min_p, top_k and top_p applied, in the sampler's order; what was left out is
    minus infinity. Greedy rows are returned as they are.

    Args:
        logits_RV: after penalties, biases and plugged processors. top_k_R: 0 keeps all.
    """
    heat_R1 = torch.where(greedy_R, 1.0, temperature_R).unsqueeze(-1)
    scaled_RV = logits_RV.float() / heat_R1
    ordered_RV, order_RV = scaled_RV.sort(dim=-1, descending=True, stable=True)
    weights_RV = (ordered_RV - ordered_RV[:, :1].clamp_min(torch.finfo(torch.float32).min)).exp()
    place_V = torch.arange(weights_RV.shape[1], device=weights_RV.device)
    top_k_R1 = top_k_R.unsqueeze(-1)
    dropped_RV = (weights_RV < min_p_R.unsqueeze(-1)) | ((place_V >= top_k_R1) & (top_k_R1 > 0))
    share_RV = weights_RV.masked_fill(dropped_RV, 0.0).double().cumsum(-1)
    before_RV = share_RV - weights_RV.masked_fill(dropped_RV, 0.0)
    limit_R1 = top_p_R.double().unsqueeze(-1)
    dropped_RV |= (before_RV >= limit_R1 * share_RV[:, -1:]) & (limit_R1 < 1.0)
    dropped_RV &= ~greedy_R.unsqueeze(-1)
    return scaled_RV.scatter(1, order_RV, ordered_RV.masked_fill(dropped_RV, float("-inf")))
