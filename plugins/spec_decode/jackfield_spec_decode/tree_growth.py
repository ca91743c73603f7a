"""Trees of drafts that are grown level by level from what a model says comes next.

The value of a draft is the probability of all tokens on the way to it, by the draft model. A level's most valuable
drafts are grown on, and of all that came up the most valuable are drafted (EAGLE-2: Li et al. 2024, arXiv:2406.16858,
section 4). As no draft is worth more than its parent, what is left is a tree again.

Legend: B sequences, W drafts that are grown on, N drafts of a level, K drafts.
"""

from __future__ import annotations

import torch


class GrowingTree:
    """Candidates of all levels so far, parents before children.

    Args:
        width: W, and the most children of a draft.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._ids: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._parents: list[torch.Tensor] = []
        self._count = 0
        self._tips_BW: torch.Tensor | None = None
        """Candidates that the next level grows on."""

    def grow(self, logits_BWV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the likeliest children of each draft that is grown on (of the last token, in the first call).

        Args:
            logits_BWV: what the draft model says behind each.

        Returns:
            [B, W] ids of the drafts that the next level grows on, and which of this level's parents each has.
        """
        rows, parents, vocabulary = logits_BWV.shape
        width = min(self._width, vocabulary)
        values_BWN, ids_BWN = logits_BWV.float().log_softmax(-1).topk(width, dim=-1)
        if self._tips_BW is None:
            own_BW = torch.full((rows, parents), -1, dtype=torch.int64, device=ids_BWN.device)
        else:
            own_BW = self._tips_BW
            values_BWN = values_BWN + torch.cat(self._values, 1).gather(1, own_BW).unsqueeze(2)
        values_BN, ids_BN = values_BWN.flatten(1), ids_BWN.flatten(1)
        best_BW = values_BN.topk(min(self._width, values_BN.shape[1]), dim=1).indices
        self._ids.append(ids_BN)
        self._values.append(values_BN)
        self._parents.append(own_BW.repeat_interleave(width, 1))
        self._tips_BW = best_BW + self._count
        self._count += ids_BN.shape[1]
        return ids_BN.gather(1, best_BW), best_BW // width

    def best(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and parents [B, K] of the ``count`` most valuable drafts, parents before children."""
        values, ids, parents = (torch.cat(part, 1) for part in (self._values, self._ids, self._parents))
        # Sorted stably: of a parent and a child that are worth the same, the parent comes first.
        best_BK = values.sort(dim=1, descending=True, stable=True).indices[:, :count]
        chosen_BK = best_BK.sort(dim=1).values
        place_BN = torch.full_like(ids, -1)
        places = torch.arange(chosen_BK.shape[1], device=ids.device).expand_as(chosen_BK)
        place_BN.scatter_(1, chosen_BK, places)
        above_BK = parents.gather(1, chosen_BK)
        found_BK = torch.where(above_BK < 0, -1, place_BN.gather(1, above_BK.clamp(min=0)))
        return ids.gather(1, chosen_BK), found_BK
