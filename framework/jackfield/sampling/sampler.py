"""Sampler: logits to tokens for all rows of a step at once.

Order of operations: edits (see ``edits``) → plugged processors → temperature → min_p → top_k → top_p → draw; what comes
from the temperature on is the op ``draw_tokens``. Greedy rows take the largest edited logit. Draws depend on the
request's seed and the token's position alone, so batch mates change nothing.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import DrawBatch
from jackfield.protocol.requests import TokenLogprobs
from jackfield.sampling.draw import draw_tokens
from jackfield.sampling.edits import Penalties, edit_first, edit_last, penalize
from jackfield.sampling.logprobs import token_logprobs
from jackfield.sampling.processed import processed_logits
from jackfield.sampling.processors import Processors, apply_processors
from jackfield.sampling.state import SamplingState

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]

Draw = Callable[[torch.Tensor, DrawBatch], torch.Tensor]


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
        processors: plugged logits processors by name, in the order in which they are applied. draw: the op
            ``draw_tokens``. mode: what log
            probabilities are of: ``raw_`` (the model's) or ``processed_`` (those drawn from), ``logprobs`` or
            ``logits``.
    """

    def __init__(
        self,
        state: SamplingState,
        processors: Processors | None = None,
        mode: LogprobsMode = "raw_logprobs",
        draw: Draw = draw_tokens,
    ) -> None:
        self._state, self._draw = state, draw
        self._processors = processors or {}
        self.shows_processed = mode.startswith("processed")
        self.as_logits = mode.endswith("logits")

    @property
    def state(self) -> SamplingState:
        """The parameters by slot."""
        return self._state

    def distribution(self, edited_RV: torch.Tensor, slots: npt.NDArray[np.int32]) -> torch.Tensor:
        """Return [R, V] the probabilities that tokens are drawn by, float32; of greedy rows those of the logits.

        Args:
            edited_RV: what :meth:`sample` returned, or logits of a draft model. slots: [R].
        """
        return self._processed(edited_RV, slots).softmax(-1)

    def sample(self, logits_RV: torch.Tensor, rows: SampleRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [R] sampled ids (int64) and the logits that they were drawn from: ``logits`` themselves, which are
        not changed, or edited ones in float32.
        """
        state = self._state
        edited_RV = logits_RV
        if state.edits[rows.slots].any():
            edited_RV = self._edit(logits_RV.float() if logits_RV.dtype != torch.float32 else logits_RV.clone(), rows)
        if state.greedy[rows.slots].all():
            return edited_RV.argmax(-1), edited_RV
        return self._draw(edited_RV, state.batch(rows.slots, rows.slots_device, rows.lengths)), edited_RV

    def logprobs(
        self, logits_RV: torch.Tensor, ids_R: torch.Tensor, slots: npt.NDArray[np.int32]
    ) -> list[TokenLogprobs | None] | None:
        """Return log probabilities of the chosen tokens for rows that asked, or None when none did.

        Args:
            logits_RV: the model's own; where processed ones are wanted, those that :meth:`sample` returned.
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
        single = np.flatnonzero(state.single_edits[rows.slots]).tolist()
        extras = {row: state.extras[int(rows.slots[row])] for row in single}
        lengths = {row: int(rows.lengths[row]) for row in single}
        allowed = {
            row: edit_first(logits_RV[row], extras[row], rows.tokens[int(rows.slots[row]), : lengths[row]])
            for row in single
        }
        penalized = np.flatnonzero(state.penalized[rows.slots])
        if len(penalized):
            self._penalize(logits_RV, rows, penalized)
        for row in single:
            edit_last(logits_RV[row], extras[row], lengths[row], allowed[row])
        apply_processors(self._processors, state, logits_RV, rows.slots, rows.lengths, rows.tokens)
        return logits_RV

    def _penalize(self, logits_RV: torch.Tensor, rows: SampleRows, which: npt.NDArray[np.int64]) -> None:
        state, device = self._state, logits_RV.device
        slots = rows.slots[which]

        def send(values: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(values).to(device)

        by = Penalties(
            repetition=send(state.host["repetition"][slots]),
            frequency=send(state.host["frequency"][slots]),
            presence=send(state.host["presence"][slots]),
            lengths=send(rows.lengths[which].astype(np.int64)),
            prompts=send(state.prompts[slots]),
        )
        tokens_RL = rows.tokens[send(slots.astype(np.int64)), : int(rows.lengths[which].max())]
        if len(which) == len(logits_RV):
            penalize(logits_RV, tokens_RL, by)
            return
        index = send(which)
        part_RV = logits_RV[index]
        penalize(part_RV, tokens_RL, by)
        logits_RV[index] = part_RV
