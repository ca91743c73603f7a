"""The loop of the optimizer: AdamW (arXiv:1711.05101), a warm-up and half a cosine (arXiv:1608.03983)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jackfield.errors import ConfigError
from jackfield.interfaces import DraftTrainer, TrainingBatch

WARMUP = (0.1, 100)
"""Steps until the learning rate is at its highest: a share of all, and most."""
LOWEST = 0.05
"""Share of the learning rate that is left at the end."""
DECAY, BETAS, LARGEST_GRADIENT = 0.01, (0.9, 0.95), 1.0


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One step of the optimizer: ``step`` of ``steps``, its loss, and tokens that were learnt from so far."""

    step: int
    steps: int
    loss: float
    tokens: int
    learning_rate: float


def learn(
    trainer: DraftTrainer,
    batches: Iterable[TrainingBatch],
    steps: int,
    learning_rate: float,
    narrow: torch.autocast,
) -> Iterator[TrainingStep]:
    """Yield each of ``steps`` steps, one for a batch, when it is done.

    Args:
        learning_rate: the highest. narrow: in which losses are computed.

    Raises:
        ConfigError: the loss is no number any more.
    """
    parameters = [one for one in trainer.module.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(_by_decay(parameters), lr=learning_rate, betas=BETAS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    tokens = 0
    for step, batch in enumerate(batches, 1):
        loss = _backward(trainer, batch, narrow)
        _check_finite(loss, learning_rate)
        torch.nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT)
        used = float(schedule.get_last_lr()[0])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        tokens += int(batch.lengths.sum())
        yield TrainingStep(step, steps, loss, tokens, used)


def rate(step: int, steps: int) -> float:
    """Return the share of the learning rate at a step from 0: a straight line up, then half a cosine down."""
    warm = max(1, min(round(steps * WARMUP[0]), WARMUP[1]))
    if step < warm:
        return (step + 1) / warm
    way = (step - warm) / max(1, steps - warm)
    return LOWEST + (1 - LOWEST) * (1 + math.cos(math.pi * way)) / 2


def _backward(trainer: DraftTrainer, batch: TrainingBatch, narrow: torch.autocast) -> float:
    """Add up gradients part by part, and return the loss."""
    loss = torch.zeros((), device=batch.hidden.device)
    parts = trainer.losses(batch)
    while True:
        with narrow:
            part = next(parts, None)
        if part is None:
            return float(loss)
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.detach()


def _by_decay(parameters: Sequence[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Return groups for the optimizer: matrices decay, gains and biases do not."""
    matrices = [one for one in parameters if one.dim() > 1]
    others = [one for one in parameters if one.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _check_finite(loss: float, learning_rate: float) -> None:
    if not math.isfinite(loss):
        raise ConfigError(
            "the loss is no number any more: the training diverged",
            field="--learning-rate",
            value=learning_rate,
            remedy="use a lower learning rate",
        )
