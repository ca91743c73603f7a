"""Recorded rounds of speculation: the target verifies drafts, and a drafter that can be recorded makes the next ones.

A round is two recordings. The first computes each sequence's last known token and its drafts; the second keeps the
drafts that are what was sampled in their place, writes the token behind them, and drafts. What is sampled may be chosen
in any way between the two. Where a sequence stands is kept on the device, so that a round may be launched before the
host knows how the one before it ended.

Legend: B sequences, K drafts, N = 1 + K tokens, T = B N, E width, V vocabulary, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from jackfield.interfaces import Drafter, DraftRound, GraphApi
from jackfield.protocol import SchedulerOutput
from jackfield.worker.graphs import WARMUPS, recording
from jackfield.worker.input_batch import InputBatch, StepInputs
from jackfield.worker.transfer import Transfer

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Larger batches keep a device so busy that drafts do not pay."""
SLOTS, STARTS, DRAFTS, ROOM, IDS = range(5)
"""Rows of what the host gives: slots; the position of the first token, -1: where the round before ended; how many
drafts are verified; how many there is room for in the next round; and from there on drafts, -1: those of the round
before.
"""


@dataclass(slots=True)
class TargetPass:
    """What the target computed in a round: all tensors are those of the recording, cut to the sequences of the step.

    Args:
        inputs: with ``ends`` of the step. hidden_TE: final states. logits_TV: behind each token. ids_BN: the largest of
            each; what stands there is what was sampled when the round goes on.
    """

    inputs: StepInputs
    hidden_TE: torch.Tensor
    logits_TV: torch.Tensor
    ids_BN: torch.Tensor


@dataclass(slots=True)
class Round:
    """One recorded number of sequences."""

    given: torch.Tensor
    inputs: StepInputs
    starts_B: torch.Tensor
    counts_B: torch.Tensor
    drafts_BK: torch.Tensor
    hidden_TE: torch.Tensor
    logits_TV: torch.Tensor
    ids_BN: torch.Tensor
    verify: Any = None
    draft: Any = None
    result: torch.Tensor | None = None


class RoundGraphs:
    """Recorded rounds by number of sequences.

    Args:
        api: of the platform. batch: per-slot tables. forward: inputs to final states [T, E], leaving taps in the
            inputs. logits: of states. transfer: to the device. num_drafts: K. sizes: numbers of sequences.
        vocab_size: V. max_length: tokens of a sequence. ops: of recorded steps, by name. drafter: one that
            can be recorded, or None: rounds end with the verification's logits then.
    """

    def __init__(
        self,
        api: GraphApi,
        batch: InputBatch,
        forward: Callable[[StepInputs], torch.Tensor],
        logits: Callable[[torch.Tensor], torch.Tensor],
        transfer: Transfer,
        num_drafts: int,
        sizes: tuple[int, ...],
        vocab_size: int,
        max_length: int,
        ops: Mapping[str, Callable[..., Any]],
        drafter: Drafter | None = None,
    ) -> None:
        self._api, self._batch, self._forward, self._logits, self._transfer = api, batch, forward, logits, transfer
        self._width, self.sizes, self._vocab_size, self._drafter = num_drafts, sizes, vocab_size, drafter
        self._pool = api.new_pool()
        self._rounds: dict[int, Round] = {}
        self._max_length, self._ops = max_length, ops
        self._numbers = torch.arange(max(*sizes, num_drafts), device=transfer.device)
        self._proposed = torch.zeros(len(batch.tokens), dtype=torch.int64, device=transfer.device)

    @property
    def drafts(self) -> bool:
        """Whether rounds draft."""
        return self._drafter is not None

    def try_drafter(self) -> None:
        """Run the drafter once as it will be recorded; what it raises is the caller's."""
        round_ = self._new_round(self.sizes[0])
        self._draft(round_)

    def record_all(self) -> None:
        """Record every size, the largest first: the smaller ones then fit into its memory."""
        for size in sorted(self.sizes, reverse=True):
            self._rounds[size] = self._record(size)

    def fits(self, plan: SchedulerOutput) -> bool:
        """Return whether the plan is a round of a recorded size. Where rounds do not draft, one without drafts is none:
        it is a decode step.
        """
        drafts = plan.num_drafts
        if drafts is None or len(plan.slots) > max(self.sizes) or not plan.is_round:
            return False
        return self.drafts or bool(drafts.any())

    def verify(self, plan: SchedulerOutput) -> TargetPass:
        """Compute the step's tokens; what is returned is valid until the next round."""
        assert plan.num_drafts is not None
        count, width = len(plan.slots), self._width
        round_ = self._round_of(count)
        host = np.full((IDS + width, round_.given.shape[1]), -1, dtype=np.int64)
        host[:IDS] = 0
        host[SLOTS] = self._batch.padding_slot
        host[SLOTS, :count], host[STARTS, :count], host[DRAFTS, :count] = plan.slots, plan.starts, plan.num_drafts
        host[ROOM, :count] = width if plan.draft_limits is None else plan.draft_limits
        if plan.ahead:
            host[STARTS, :count] = -1
        elif plan.drafts is not None:
            real = np.arange(width) < plan.num_drafts[:, None]
            host[IDS:, :count] = np.where(real, plan.drafts[:, :width], -1).T
        round_.given.copy_(self._transfer.send(host), non_blocking=True)
        self._api.replay(round_.verify)
        ends = np.arange(count) * (1 + width) + 1 + plan.num_drafts
        tokens = count * (1 + width)
        inputs = replace(round_.inputs, ends=ends.astype(np.int64))
        return TargetPass(inputs, round_.hidden_TE[:tokens], round_.logits_TV[:tokens], round_.ids_BN[:count])

    def draft(self, count: int) -> torch.Tensor:
        """Go on behind :meth:`verify`: return [B, N + K] int32, tokens that count and drafts behind them, both with -1
        behind the last.
        """
        round_ = self._round_of(count)
        self._api.replay(round_.draft)
        assert round_.result is not None
        return round_.result[:count]

    def replay_once(self, size: int) -> None:
        """Run a round as it was recorded, of rows that are no sequences, to see how long it takes."""
        round_ = self._rounds[size]
        self._api.replay(round_.verify)
        if self.drafts:
            self._api.replay(round_.draft)

    def _round_of(self, count: int) -> Round:
        return self._rounds[next(size for size in sorted(self.sizes) if size >= count)]

    def _record(self, size: int) -> Round:
        for _ in range(WARMUPS):
            round_ = self._new_round(size)
            if self.drafts:
                self._draft(round_)
        given = self._nothing(size)
        with recording(self._api, self._pool) as graph:
            round_ = self._verify(given)
        round_.verify = graph
        if self.drafts:
            with recording(self._api, self._pool) as graph:
                self._draft(round_)
            round_.draft = graph
        return round_

    def _new_round(self, size: int) -> Round:
        return self._verify(self._nothing(size))

    def _nothing(self, size: int) -> torch.Tensor:
        given = torch.zeros((IDS + self._width, size), dtype=torch.int64, device=self._transfer.device)
        given[SLOTS] = self._batch.padding_slot
        given[IDS:] = -1
        return given

    def _verify(self, given: torch.Tensor) -> Round:
        slots_B, tokens = given[SLOTS], self._batch.tokens
        starts_B, counts_B, drafts_BK = self._ops["begin_round"](
            tokens, self._batch.known, self._proposed, slots_B, given[STARTS], given[DRAFTS], given[IDS:]
        )
        inputs = self._batch.prepare_uniform(slots_B, starts_B, counts_B + 1, 1 + self._width)
        hidden_TE = self._forward(inputs)
        logits_TV = self._logits(hidden_TE)
        ids_BN = self._ops["greedy_tokens"](logits_TV).view(len(slots_B), -1)
        return Round(given, inputs, starts_B, counts_B, drafts_BK, hidden_TE, logits_TV, ids_BN)

    def _draft(self, round_: Round) -> None:
        given, ids_BN, tokens = round_.given, round_.ids_BN, self._batch.tokens
        slots_B, starts_B = given[SLOTS], round_.starts_B
        kept_B, last_B = self._ops["keep_tokens"](
            tokens, self._batch.known, slots_B, starts_B, round_.counts_B, round_.drafts_BK, ids_BN
        )
        room_B = torch.minimum(given[ROOM], self._max_length - 2 - starts_B - kept_B)
        found_BK = self._found(round_, kept_B, last_B, room_B)
        round_.result = self._ops["end_round"](
            tokens, self._proposed, slots_B, starts_B, kept_B, room_B, ids_BN, found_BK, self._vocab_size
        )

    def _found(self, round_: Round, kept_B: torch.Tensor, last_B: torch.Tensor, room_B: torch.Tensor) -> torch.Tensor:
        """Return [B, K] what the drafter proposes."""
        assert self._drafter is not None, "rounds without a drafter end before"
        count, hidden_TE = len(kept_B), round_.hidden_TE
        taps: Mapping[int, torch.Tensor] = round_.inputs.taps
        return self._drafter.draft(
            DraftRound(
                slots=round_.given[SLOTS],
                starts=round_.starts_B,
                kept=kept_B,
                room=room_B,
                last_tokens=last_B,
                hidden=hidden_TE.view(count, -1, hidden_TE.shape[-1]),
                taps=[taps[layer].view(count, -1, taps[layer].shape[-1]) for layer in self._drafter.taps],
                tokens=self._batch.tokens,
                num_drafts=self._width,
                rows=self._numbers[:count],
                places=self._numbers[: self._width],
            )
        )
