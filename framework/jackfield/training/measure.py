"""How often greedy drafts are right. Legend: K drafts, N rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from jackfield.interfaces import Agreement, DraftTrainer, TrainingBatch


@dataclass(frozen=True, slots=True)
class Measured:
    """Accuracy on texts that were not learnt from.

    Args:
        places: [K] share of drafts of each place that are the target's greedy token behind the same text.
        accepted: how many drafts in a row are right, on average: what a chain of K drafts brings in a step besides the
            target's own token.
        rows: places of the text that were looked at.
    """

    places: tuple[float, ...]
    accepted: float
    rows: int


@torch.no_grad()
def measure(trainer: DraftTrainer, batches: Iterable[TrainingBatch]) -> Measured:
    """Return how the trainer's drafts do on batches."""
    right = known = torch.zeros(0, dtype=torch.int64)
    chained = rows = 0
    trainer.module.eval()
    for batch in batches:
        found = trainer.agreement(batch)
        right, known = _plus(right, found.right.sum(0)), _plus(known, found.known.sum(0))
        whole = found.known.all(1)
        chained += int(_chains(found)[whole].sum())
        rows += int(whole.sum())
    trainer.module.train()
    places = tuple((right / known.clamp(min=1)).tolist())
    return Measured(places, chained / max(1, rows), rows)


def _chains(found: Agreement) -> torch.Tensor:
    """Return [N] drafts before the first wrong one."""
    return found.right.long().cumprod(1).sum(1)


def _plus(total: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    return more.cpu() if not len(total) else total + more.cpu()
