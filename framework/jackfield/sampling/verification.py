"""Which drafts are kept, and the token that comes behind them, so that what comes out follows the target's
distribution.

A draft that is certain is kept where it is what the target samples in its place. Drafts that were drawn from a
distribution q are kept by what the target's distribution p says of them, one by one (rejection sampling: Leviathan et
al. 2023, arXiv:2211.17192, algorithm 1; Chen et al. 2023, arXiv:2302.01318) or as a block (Sun et al. 2024,
arXiv:2403.10444, algorithm 2), which keeps no fewer.

Where drafts branch, the children of the last one that was kept are tried one after another, by what those before them
left of p (multi-step speculative sampling: Miao et al. 2023, arXiv:2305.09781, algorithm 2).

Legend: R rows, K drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from jackfield.sampling.draw import invert

VerificationMethod = Literal["standard", "block"]


def keep_equal(drafts_RK: torch.Tensor, sampled_RK: torch.Tensor, counts_R: torch.Tensor) -> torch.Tensor:
    """Return [R] how many drafts are kept: those before the first that is not what the target sampled in its place.

    For drafts that are certain this keeps the target's distribution exactly, and even its draws: the token that comes
    out is always the target's own.
    """
    place_K = torch.arange(drafts_RK.shape[1], device=drafts_RK.device)
    equal = (drafts_RK == sampled_RK) & (place_K < counts_R.unsqueeze(1))
    return equal.long().cumprod(1).sum(1)


def keep_drawn(
    p_RKV: torch.Tensor,
    q_RKV: torch.Tensor,
    drafts_RK: torch.Tensor,
    counts_R: torch.Tensor,
    u_RK: torch.Tensor,
    last_u_RK: torch.Tensor,
    method: VerificationMethod = "standard",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [R] how many drafts are kept, and [R] the token behind them.

    Args:
        p_RKV: [R, K + 1, V] what the target draws from in the place of each draft, and behind the last.
        q_RKV: what the drafts were drawn from. drafts_RK: int64; what lies behind a row's last draft does not matter.
        counts_R: drafts of each row. u_RK: uniform numbers in [0, 1), float64, that drafts are kept by. last_u_RK:
            [R, K + 1] those that the token behind the kept drafts is drawn by, whichever place that is.
    """
    accept = _block if method == "block" else _one_by_one
    drafts_RK = drafts_RK.clamp(min=0)
    p, q = p_RKV[:, :-1].gather(2, drafts_RK.unsqueeze(2)), q_RKV.gather(2, drafts_RK.unsqueeze(2))
    place_K = torch.arange(drafts_RK.shape[1], device=drafts_RK.device)
    ratio_RK = (p.squeeze(2).double() / q.squeeze(2).double()).nan_to_num_(0.0)
    ratio_RK.masked_fill_(place_K >= counts_R.unsqueeze(1), 0.0)
    kept_R, share_R = accept(ratio_RK, u_RK, counts_R, lambda place: (p_RKV[:, place], q_RKV[:, place]))
    rows = torch.arange(len(kept_R), device=kept_R.device)
    p_RV, q_RV = p_RKV[rows, kept_R].double(), q_RKV[rows, kept_R.clamp(max=q_RKV.shape[1] - 1)].double()
    left_RV = (share_R.unsqueeze(1) * p_RV - q_RV).clamp_min_(0.0)
    # Behind the last draft nothing was drawn; where p and q are the same but for rounding, nothing is left of p.
    whole_R = (kept_R == counts_R) | (left_RV.sum(1) <= 0)
    return kept_R, invert(torch.where(whole_R.unsqueeze(1), p_RV, left_RV), last_u_RK[rows, kept_R])


def walk_equal(
    drafts_RK: torch.Tensor, parents_RK: torch.Tensor, sampled_RN: torch.Tensor, counts_R: torch.Tensor
) -> torch.Tensor:
    """Return [R, K] bool, which drafts are kept of those that branch: from the last token on, each is what the target
    sampled behind the one before.

    Args:
        sampled_RN: [R, K + 1] what the target samples behind the last token, and behind each draft.
    """
    kept_RK = torch.zeros(drafts_RK.shape, dtype=torch.bool, device=drafts_RK.device)
    last_R = torch.full_like(counts_R, -1)
    for index in range(drafts_RK.shape[1]):
        wanted_R = sampled_RN.gather(1, (last_R + 1).unsqueeze(1)).squeeze(1)
        mine_R = (parents_RK[:, index] == last_R) & (index < counts_R) & (drafts_RK[:, index] == wanted_R)
        kept_RK[:, index] = mine_R
        last_R = torch.where(mine_R, index, last_R)
    return kept_RK


def walk_drawn(
    p_RNV: torch.Tensor,
    q_RKV: torch.Tensor,
    drafts_RK: torch.Tensor,
    parents_RK: torch.Tensor,
    counts_R: torch.Tensor,
    u_RK: torch.Tensor,
    last_u_RN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [R, K] bool, which drafts are kept of those that branch, and [R] the token behind the last one kept.

    Args:
        p_RNV: [R, K + 1, V] what the target draws from behind the last token, and behind each draft. q_RKV: what each
            draft was drawn from, given its parent and the siblings before it. drafts_RK: int64. counts_R: drafts of
            each row. u_RK: uniform numbers that drafts are kept by. last_u_RN: [R, K + 1] those that the token behind
            the kept drafts is drawn by, by how many were kept.
    """
    kept_RK = torch.zeros(drafts_RK.shape, dtype=torch.bool, device=drafts_RK.device)
    last_R, left_RV = torch.full_like(counts_R, -1), p_RNV[:, 0].double()
    for index in range(drafts_RK.shape[1]):
        tried_R = (parents_RK[:, index] == last_R) & (index < counts_R)
        q_RV, token_R1 = q_RKV[:, index].double(), drafts_RK[:, index].clamp(min=0).unsqueeze(1)
        ratio_R = (left_RV.gather(1, token_R1) / q_RV.gather(1, token_R1)).squeeze(1).nan_to_num_(0.0)
        kept_R = tried_R & (u_RK[:, index] < ratio_R)
        rest_RV = (left_RV - q_RV).clamp_min_(0.0)
        rest_R1 = rest_RV.sum(1, keepdim=True)
        # Where p and q are the same but for rounding, nothing is left of p.
        rest_RV = torch.where(rest_R1 > 0, rest_RV / rest_R1, left_RV)
        left_RV = torch.where((tried_R & ~kept_R).unsqueeze(1), rest_RV, left_RV)
        left_RV = torch.where(kept_R.unsqueeze(1), p_RNV[:, index + 1].double(), left_RV)
        kept_RK[:, index] = kept_R
        last_R = torch.where(kept_R, index, last_R)
    return kept_RK, invert(left_RV, last_u_RN.gather(1, kept_RK.sum(1, keepdim=True)).squeeze(1))


Pair = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Place to p and q [R, V] there."""


def _one_by_one(
    ratio_RK: torch.Tensor, u_RK: torch.Tensor, counts_R: torch.Tensor, _at: Pair
) -> tuple[torch.Tensor, torch.Tensor]:
    kept = (u_RK < ratio_RK).long().cumprod(1).sum(1)
    return kept, torch.ones_like(u_RK[:, 0])


def _block(
    ratio_RK: torch.Tensor, u_RK: torch.Tensor, counts_R: torch.Tensor, at: Pair
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return kept drafts and by what p counts in the remainder: the longest block that passes its test."""
    kept_R, share_R = torch.zeros_like(counts_R), torch.ones_like(u_RK[:, 0])
    running_R = share_R
    for place in range(ratio_RK.shape[1]):
        running_R = (running_R * ratio_RK[:, place]).clamp(max=1.0)
        last_R = counts_R == place + 1
        chance_R = running_R
        if place + 1 < ratio_RK.shape[1]:
            p_RV, q_RV = at(place + 1)
            more_R = (running_R.unsqueeze(1) * p_RV.double() - q_RV.double()).clamp_min_(0.0).sum(1)
            chance_R = torch.where(last_R, running_R, (more_R / (more_R + 1.0 - running_R)).nan_to_num_(1.0))
        passed_R = (u_RK[:, place] < chance_R) & (place < counts_R)
        kept_R = torch.where(passed_R, place + 1, kept_R)
        share_R = torch.where(passed_R, running_R, share_R)
    return kept_R, share_R
