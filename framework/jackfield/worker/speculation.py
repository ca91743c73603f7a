"""Speculation: a drafter at work, and the verification of its drafts.

Legend: R rows that sample, K drafts, N places where a step samples (behind each row's last token and each of its
drafts), B sequences that want drafts, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import DraftBatch, Drafter, DraftOutcome, Drafts
from jackfield.protocol import NewSequence, SchedulerOutput
from jackfield.sampling import Sampler
from jackfield.sampling.random import stream, uniform
from jackfield.sampling.verification import VerificationMethod, keep_drawn, keep_equal
from jackfield.worker.drawn import DraftDraws, Drawn
from jackfield.worker.transfer import Transfer

Ints = npt.NDArray[np.int32]
T = TypeVar("T")
ACCEPTING = 2
"""Number of the stream of random numbers that drafts are accepted by."""

_logger = logging.getLogger("jackfield.drafters")


@dataclass(slots=True)
class Places:
    """Where a step samples.

    Args:
        rows: [R] sequences of the plan that sample. slots: [R] theirs. drafts: [R] drafts each has. known: [R] tokens
            before each one's first place. owner, within: [N] row and place of each; a row's places are neighbours.
    """

    rows: npt.NDArray[np.int64]
    slots: Ints
    drafts: Ints
    known: Ints
    owner: npt.NDArray[np.int64]
    within: npt.NDArray[np.int64]

    @classmethod
    def of(cls, plan: SchedulerOutput) -> Places:
        """Return the places of a plan with drafts."""
        assert plan.num_drafts is not None
        rows = np.flatnonzero(plan.samples)
        drafts = plan.num_drafts[rows]
        owner = np.repeat(np.arange(len(rows)), drafts + 1)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(drafts + 1) - drafts - 1, drafts + 1)
        known = (plan.starts + plan.counts)[rows] - drafts
        return cls(rows, plan.slots[rows], drafts, known, owner, within)

    @property
    def lengths(self) -> Ints:
        """[N] tokens before each place."""
        return (self.known[self.owner] + self.within).astype(np.int32)

    def table(self, values: npt.NDArray[Any], width: int) -> npt.NDArray[np.int64]:
        """Return [R, width] the values [N] of each row's places, -1 behind the last."""
        table = np.full((len(self.rows), width), -1, dtype=np.int64)
        table[self.owner, self.within] = values
        return table


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """Sizes: K drafts, tokens of a sequence, vocabulary; and how drafts that were drawn are verified."""

    num_drafts: int
    max_length: int
    vocab_size: int
    method: VerificationMethod = "standard"
    greedy_drafts: bool = False


class Speculation:
    """A drafter and what is kept between its proposals and their verification. Whatever a drafter does, requests go on:
    one that raises, or returns what is no draft, is named in the log and switched off.

    Args:
        drafter: built. sampler: of the target. limits: sizes. slots: sequences that run at once. transfer: to the
            device.
    """

    def __init__(
        self, drafter: Drafter, sampler: Sampler, limits: SpeculationLimits, slots: int, transfer: Transfer
    ) -> None:
        self._drafter: Drafter | None = drafter
        self._sampler, self._limits, self._transfer = sampler, limits, transfer
        self._drawn: Drawn | None = None
        hosted = drafter.placement == "host"
        self._tokens = np.zeros((slots, limits.max_length + limits.num_drafts + 1), dtype=np.int32) if hosted else None

    @property
    def drafter(self) -> Drafter | None:
        """The drafter, or None once it failed."""
        return self._drafter

    def fill(self, new: list[NewSequence]) -> None:
        """Take the tokens of sequences that got a slot."""
        if self._tokens is not None:
            for one in new:
                self._tokens[one.slot, : len(one.token_ids)] = one.token_ids

    def note(self, plan: SchedulerOutput, ids_R: Ints) -> None:
        """Take what a step without drafts sampled."""
        if self._tokens is not None:
            self._tokens[plan.slots[plan.samples], (plan.starts + plan.counts)[plan.samples]] = ids_R

    def release(self, slots: list[int]) -> None:
        """Forget sequences that gave up their slots."""
        if self._drawn is not None:
            self._drawn.forget(slots)
        self.guard(lambda drafter: drafter.forget(slots))

    def verify(
        self, plan: SchedulerOutput, places: Places, sampled_N: torch.Tensor, edited_NV: torch.Tensor
    ) -> tuple[Ints, npt.NDArray[np.int64]]:
        """Return tokens [R, 1 + K] (-1 behind the last that counts) and [R] how many drafts of each row were kept.

        Args:
            sampled_N: what the target samples in each place. edited_NV: the logits it was sampled from.
        """
        assert plan.drafts is not None
        drafts = plan.drafts[places.rows]
        tokens = places.table(sampled_N.cpu().numpy(), 1 + drafts.shape[1])
        accepted = keep_equal(*map(torch.from_numpy, (drafts, tokens[:, :-1], places.drafts))).numpy()
        if self._drawn is not None:
            which, at = self._drawn.find(places.slots, places.known, places.drafts)
            if len(which):
                kept, last = self._verify_drawn(places, drafts, which, self._drawn.probabilities[at], edited_NV)
                accepted[which] = kept
                tokens[which, :-1] = drafts[which]
                tokens[which, kept] = last
        tokens[np.arange(tokens.shape[1]) > accepted[:, None]] = -1
        if self._tokens is not None:
            row, place = np.nonzero(tokens >= 0)
            self._tokens[places.slots[row], places.known[row] + place] = tokens[row, place]
        return tokens.astype(np.int32), accepted

    def observe(self, places: Places, accepted: npt.NDArray[np.int64]) -> None:
        """Tell the drafter what became of its drafts."""
        self.guard(lambda drafter: drafter.observe(DraftOutcome(places.slots, accepted)))

    def propose(
        self,
        slots: Ints,
        lengths: Ints,
        wanted: Ints | None,
        hidden_BE: torch.Tensor | None = None,
        last_B: torch.Tensor | None = None,
    ) -> Ints | None:
        """Return drafts [B, K], cut at the first illegal id and at each row's limit; None where there are none.

        Args:
            slots: [B]. lengths: [B] tokens of each sequence now. wanted: [B] most drafts of each, or None for K.
            hidden_BE: the states that the last tokens ``last_B`` were sampled from.
        """
        width = self._limits.num_drafts
        limits = np.clip(self._limits.max_length - lengths, 0, width if wanted is None else wanted)
        self._drawn = None
        if not limits.any():
            return None
        draws = DraftDraws(self._sampler, slots, lengths, self._transfer, greedy=self._limits.greedy_drafts)
        view = None
        if self._tokens is not None:
            view = self._tokens.view()
            view.flags.writeable = False
        batch = DraftBatch(slots, view, lengths, limits.astype(np.int32), hidden_BE, last_B, draws)
        return self.guard(lambda drafter: self._take(drafter.propose(batch), batch, draws))

    def guard(self, call: Callable[[Drafter], T]) -> T | None:
        """Return what ``call`` makes of the drafter; None once it failed."""
        if self._drafter is None:
            return None
        try:
            return call(self._drafter)
        except Exception:
            _logger.exception(
                "drafter %s failed and is switched off; requests go on without drafts", self._drafter.name
            )
            self._drafter, self._tokens, self._drawn = None, None, None
            return None

    def _take(self, proposed: Drafts, batch: DraftBatch, draws: DraftDraws) -> Ints:
        """Return legal drafts, and keep what they were drawn from."""
        width, count = self._limits.num_drafts, len(batch.slots)
        ids = np.asarray(proposed.ids.cpu() if isinstance(proposed.ids, torch.Tensor) else proposed.ids)
        if ids.ndim != 2 or len(ids) != count or not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"drafts of {count} sequences are integers [{count}, K], not {ids.dtype} {ids.shape}")
        self._drawn = draws.drawn(ids, proposed.probabilities, self._limits.vocab_size)
        ids = ids[:, :width]
        legal = (ids >= 0) & (ids < self._limits.vocab_size)
        legal &= np.arange(ids.shape[1]) < batch.limits[:, None]
        drafts = np.full((count, width), -1, dtype=np.int32)
        drafts[:, : ids.shape[1]] = np.where(np.cumprod(legal, axis=1) == 1, ids, -1)
        return drafts

    def _verify_drawn(
        self, places: Places, drafts: Ints, which: npt.NDArray[np.int64], q_RKV: torch.Tensor, edited_NV: torch.Tensor
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return [R'] kept drafts and the tokens behind them of the rows ``which``."""
        device, send = edited_NV.device, self._transfer.send_index
        counts = places.drafts[which]
        width = int(counts.max())
        index = places.table(np.arange(len(places.owner)), 1 + drafts.shape[1])[which, : width + 1].clip(min=0)
        slots = places.slots[which]
        flat = send(index.reshape(-1))
        p_RKV = self._sampler.distribution(edited_NV[flat], slots.repeat(width + 1))
        p_RKV = p_RKV.view(len(which), width + 1, -1)
        seeds = self._sampler.state.seeds[send(slots)]
        known = send(places.known[which])
        place_K = torch.arange(width, device=device)
        u_RK = uniform(stream(seeds, ACCEPTING, known).unsqueeze(1), place_K.unsqueeze(0))
        # What comes behind the kept drafts is drawn by the number of its own position, whichever that is.
        u_last_RK = uniform(seeds.unsqueeze(1), known.unsqueeze(1) + torch.arange(width + 1, device=device))
        ids = send(drafts[which, :width])
        kept, last = keep_drawn(p_RKV, q_RKV[:, :width], ids, send(counts), u_RK, u_last_RK, self._limits.method)
        return kept.cpu().numpy(), last.cpu().numpy()
