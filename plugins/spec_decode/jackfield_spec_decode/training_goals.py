"""What the target says of a batch of documents, a few rows at a time: logits of large vocabularies are large.

Legend: B documents, L tokens of the longest, N places, E width, V vocabulary, D tokens that are learnt, K drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from jackfield.interfaces import TrainingBatch, TrainingTarget

ROWS = 1024
"""Places whose logits are in memory at once."""
FADING = 0.8
"""Weight of a draft's loss beside that of the draft before it: a draft counts only where those before are right."""


@dataclass(frozen=True, slots=True)
class Places:
    """Places of documents, of the flattened batch.

    Args:
        document, token: [N] where they are.
    """

    document: torch.Tensor
    token: torch.Tensor

    @classmethod
    def of(cls, batch: TrainingBatch) -> Places:
        """Return all places that a draft may stand behind: every token of a document but the first."""
        inside_BL = torch.arange(batch.ids.shape[1], device=batch.ids.device) < batch.lengths[:, None]
        inside_BL[:, 0] = False
        document, token = inside_BL.nonzero(as_tuple=True)
        return cls(document, token)

    def __len__(self) -> int:
        return len(self.token)

    def __getitem__(self, index: torch.Tensor | slice) -> Places:
        return Places(self.document[index], self.token[index])

    def chunks(self) -> Iterator[Places]:
        """Yield them in parts of at most ``ROWS``."""
        for start in range(0, len(self), ROWS):
            yield self[start : start + ROWS]

    def before(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return indices into [B, L] of the places that lie ``count`` tokens before."""
        return self.document, self.token - count


def goal_logits(target: TrainingTarget, batch: TrainingBatch, places: Places) -> torch.Tensor:
    """Return [N, V] the target's logits for the tokens behind some places."""
    return target.logits(batch.hidden[places.before(0)])


def greedy(target: TrainingTarget, batch: TrainingBatch) -> torch.Tensor:
    """Return [B, L] the target's greedy token behind each token but the first ones; 0 elsewhere."""
    best_BL = torch.zeros_like(batch.ids)
    for part in Places.of(batch).chunks():
        best_BL[part.before(0)] = goal_logits(target, batch, part).argmax(-1)
    return best_BL


def reached(batch: TrainingBatch, places: int) -> torch.Tensor:
    """Return [N, K] for rows that begin behind each token but the last: whether the document has the token that stands
    in front of each draft.
    """
    first_BL1 = torch.arange(1, batch.ids.shape[1] + 1, device=batch.ids.device)[None, :, None]
    reach_BLK = first_BL1 + torch.arange(places, device=batch.ids.device) < batch.lengths[:, None, None]
    return reach_BLK[reach_BLK[..., 0]]


def ahead(values_BL: torch.Tensor, count: int) -> torch.Tensor:
    """Return [B, L, ...] the values ``count`` places further on; 0 where there are none."""
    moved = torch.zeros_like(values_BL)
    moved[:, : max(0, values_BL.shape[1] - count)] = values_BL[:, count:]
    return moved
