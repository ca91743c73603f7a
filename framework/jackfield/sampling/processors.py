"""Plugged logits processors: which rows of a step each is applied to. Legend: R rows, V vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import LogitsProcessor, LogitsRow
from jackfield.sampling.state import SamplingState, SlotExtras

_logger = logging.getLogger("jackfield.sampling")

Processors = Mapping[str, LogitsProcessor]
"""Active processors by name, in the order in which they are applied."""


def apply_processors(
    processors: Processors,
    state: SamplingState,
    logits_RV: torch.Tensor,
    slots: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int32],
    tokens: torch.Tensor,
) -> None:
    """Apply all processors in place. Where one raises, the requests it was applied to fail: their logits are not what
    they asked for.

    Args:
        slots: [R]. lengths: [R] tokens before each row's place. tokens: [slots, length] token table.
    """
    if not state.processed[slots].any():
        return
    wanted = [state.extras[slot].processors if slot in state.extras else () for slot in slots.tolist()]
    for name, processor in processors.items():
        rows = [row for row, names in enumerate(wanted) if name in names]
        if not rows:
            continue
        views = [_view(state.extras[int(slots[r])], tokens[int(slots[r]), : int(lengths[r])]) for r in rows]
        try:
            _apply(processor, logits_RV, rows, views)
        except Exception as error:
            _logger.exception("logits processor %s failed; its requests end", name)
            text = f"logits processor '{name}' failed: {type(error).__name__}: {error}"
            state.failures.update((int(slots[row]), text) for row in rows)


def _apply(processor: LogitsProcessor, logits_RV: torch.Tensor, rows: list[int], views: Sequence[LogitsRow]) -> None:
    """Apply one processor to its rows, out of its reach those of others."""
    if len(rows) == len(logits_RV):
        processor.apply(logits_RV, views)
        return
    index = torch.tensor(rows, device=logits_RV.device)
    part_RV = logits_RV[index]
    processor.apply(part_RV, views)
    logits_RV[index] = part_RV


def _view(extras: SlotExtras, token_ids: torch.Tensor) -> LogitsRow:
    return LogitsRow(extras.request_id, token_ids, extras.prompt_length, extras.params.extra_args or {})
