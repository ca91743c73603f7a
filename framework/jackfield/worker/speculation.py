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
from jackfield.sampling.verification import VerificationMethod, keep_drawn, keep_equal, walk_drawn, walk_equal
from jackfield.worker.drawn import DraftDraws, Drawn
from jackfield.worker.host_texts import HostTexts
from jackfield.worker.transfer import Transfer
from jackfield.worker.trees import chains, checked_parents, depths, first_paths, pruned

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
            before each one's first place. owner, within: [N] row and place of each; a row's places are neighbours:
            behind its last token, and behind each of its drafts. parents: [R, K] of drafts that branch, or None.
    """

    rows: npt.NDArray[np.int64]
    slots: Ints
    drafts: Ints
    known: Ints
    owner: npt.NDArray[np.int64]
    within: npt.NDArray[np.int64]
    parents: Ints | None = None

    @classmethod
    def of(cls, plan: SchedulerOutput) -> Places:
        """Return the places of a plan with drafts."""
        assert plan.num_drafts is not None
        rows = np.flatnonzero(plan.samples)
        drafts = plan.num_drafts[rows]
        owner = np.repeat(np.arange(len(rows)), drafts + 1)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(drafts + 1) - drafts - 1, drafts + 1)
        known = (plan.starts + plan.counts)[rows] - drafts
        parents = None if plan.draft_parents is None else plan.draft_parents[rows]
        return cls(rows, plan.slots[rows], drafts, known, owner, within, parents)

    @property
    def lengths(self) -> Ints:
        """[N] tokens of the text before each place."""
        deep = self.within
        if self.parents is not None:
            deep = np.where(deep > 0, depths(self.parents)[self.owner, deep - 1], 0)
        return (self.known[self.owner] + deep).astype(np.int32)

    def table(self, values: npt.NDArray[Any], width: int) -> npt.NDArray[np.int64]:
        """Return [R, width] the values [N] of each row's places, -1 behind the last."""
        table = np.full((len(self.rows), width), -1, dtype=np.int64)
        table[self.owner, self.within] = values
        return table


@dataclass(frozen=True, slots=True)
class Verified:
    """What came of a step's drafts.

    Args:
        tokens: [R, 1 + K] that count, -1 behind the last. accepted: [R] drafts that were kept. sources: [R, 1 + K] the
            place that each token was sampled in: of drafts that branch the kept ones' need not be neighbours.
    """

    tokens: Ints
    accepted: npt.NDArray[np.int64]
    sources: npt.NDArray[np.int64]

    @property
    def moved(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """[M] rows, and the drafts that were kept and are not where a chain's would be: which ones, and which they
        become.
        """
        kept = self.sources[:, 1:] - 1
        place = np.arange(kept.shape[1])
        rows, targets = np.nonzero((kept != place) & (place < self.accepted[:, None]))
        return rows, kept[rows, targets], targets


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """Sizes: K drafts, tokens of a sequence, vocabulary; how drafts that were drawn are verified; and whether drafts
    may branch.
    """

    num_drafts: int
    max_length: int
    vocab_size: int
    method: VerificationMethod = "standard"
    greedy_drafts: bool = False
    branches: bool = False


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
        self._texts = HostTexts(slots, limits.max_length + limits.num_drafts + 1) if hosted else None

    @property
    def drafter(self) -> Drafter | None:
        """The drafter, or None once it failed."""
        return self._drafter

    def read_from(self, tokens: torch.Tensor) -> None:
        """Take texts from the device's table, where it is seldom that anything is proposed on the host."""
        if self._texts is not None:
            self._texts.read_from(tokens)

    def fill(self, new: list[NewSequence]) -> None:
        """Take the tokens of sequences that got a slot."""
        if self._texts is not None:
            self._texts.fill(new)

    def note(self, plan: SchedulerOutput, ids_R: Ints) -> None:
        """Take what a step without drafts sampled."""
        if self._texts is not None and self._texts.told:
            self._texts.add(plan.slots[plan.samples], ids_R)

    def release(self, slots: list[int]) -> None:
        """Forget sequences that gave up their slots."""
        if self._drawn is not None:
            self._drawn.forget(slots)
        self.guard(lambda drafter: drafter.forget(slots))

    def verify(
        self, plan: SchedulerOutput, places: Places, sampled_N: torch.Tensor, edited_NV: torch.Tensor
    ) -> Verified:
        """Return which drafts are kept, and the tokens behind them.

        Args:
            sampled_N: what the target samples in each place. edited_NV: the logits it was sampled from.
        """
        assert plan.drafts is not None
        drafts = plan.drafts[places.rows]
        count, width = drafts.shape
        sampled = places.table(sampled_N.cpu().numpy(), 1 + width)
        kept = _keep_certain(places, drafts, sampled)
        which, last = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        if self._drawn is not None:
            which, at = self._drawn.find(places.slots, places.known, places.drafts)
            if len(which):
                kept[which], last = self._verify_drawn(places, drafts, which, self._drawn.probabilities[at], edited_NV)
        rows, accepted = np.arange(count), kept.sum(1)
        # What is kept of a chain lies in front already.
        chain = places.parents is None
        order = np.broadcast_to(np.arange(width), kept.shape) if chain else np.argsort(~kept, axis=1, kind="stable")
        sources = np.concatenate((np.zeros((count, 1), dtype=np.int64), order + 1), axis=1)
        tokens = np.full((count, 1 + width), -1, dtype=np.int32)
        tokens[:, :-1] = np.where(np.arange(width) < accepted[:, None], np.take_along_axis(drafts, order, 1), -1)
        tokens[rows, accepted] = sampled[rows, sources[rows, accepted]]
        tokens[which, accepted[which]] = last
        if self._texts is not None and self._texts.told:
            self._texts.extend(places.slots, tokens)
        return Verified(tokens, accepted, sources)

    def draws(self, slots: Ints) -> bool:
        """Return whether drafts for some of these sequences are drawn."""
        drafter, greedy = self._drafter, self._sampler.state.greedy
        return drafter is not None and drafter.draws and not self._limits.greedy_drafts and not greedy[slots].all()

    def learn(self, slots: Ints, tokens: Ints) -> None:
        """Take the tokens [R, 1 + K] that a recorded round gave, -1 behind the last of each sequence."""
        if self._texts is not None and self._texts.told:
            self._texts.extend(slots, tokens)
        self.observe(slots, (tokens >= 0).sum(1) - 1)

    def observe(self, slots: Ints, accepted: npt.NDArray[np.int64]) -> None:
        """Tell the drafter what became of its drafts."""
        self.guard(lambda drafter: drafter.observe(DraftOutcome(slots, accepted)))

    def propose(
        self,
        slots: Ints,
        lengths: Ints,
        wanted: Ints | None,
        hidden_BE: torch.Tensor | None = None,
        last_B: torch.Tensor | None = None,
    ) -> tuple[Ints, Ints | None] | None:
        """Return drafts [B, K], cut at the first illegal id and at each row's limit, and the parents of those that
        branch, or None; None where there are none.

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
        view = None if self._texts is None else self._texts.view(slots)
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
            self._drafter, self._texts, self._drawn = None, None, None
            return None

    def _take(self, proposed: Drafts, batch: DraftBatch, draws: DraftDraws) -> tuple[Ints, Ints | None]:
        """Return legal drafts and their parents, and keep what they were drawn from."""
        width, count = self._limits.num_drafts, len(batch.slots)
        ids = np.asarray(proposed.ids.cpu() if isinstance(proposed.ids, torch.Tensor) else proposed.ids)
        if ids.ndim != 2 or len(ids) != count or not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"drafts of {count} sequences are integers [{count}, K], not {ids.dtype} {ids.shape}")
        self._drawn = draws.drawn(ids, proposed.probabilities, self._limits.vocab_size)
        legal = (ids >= 0) & (ids < self._limits.vocab_size)
        legal &= np.arange(ids.shape[1]) < batch.limits[:, None]
        drafts, parents = np.full((count, width), -1, dtype=np.int32), None
        if proposed.parents is None:
            ids = np.where(np.cumprod(legal, axis=1) == 1, ids, -1)[:, :width]
        else:
            ids, parents = self._branches(ids, checked_parents(proposed.parents, ids.shape), legal, batch.slots)
            ids = ids[:, :width]
        drafts[:, : ids.shape[1]] = ids
        return drafts, parents

    def _branches(
        self, ids_BK: Ints, parents_BK: Ints, legal_BK: npt.NDArray[np.bool_], slots: Ints
    ) -> tuple[Ints, Ints | None]:
        """Return what is left of drafts that branch, and parents [B, K], or None where all that is left are chains.

        Raises:
            TypeError: the drafter did not say that its drafts branch, so that attention is not made for it.
        """
        if not self._limits.branches:
            raise TypeError("drafts have parents, but the drafter does not say that they branch")
        # Edits of logits look at all tokens before a place, which only a chain has one behind the other.
        edited = self._sampler.state.edits[slots]
        legal_BK &= ~edited[:, None] | first_paths(parents_BK)
        ids, parents, order = pruned(ids_BK, parents_BK, legal_BK)
        if self._drawn is not None:
            self._drawn.reorder({int(slot): row for slot, row in zip(slots, order, strict=True)})
        chain = chains(len(ids), self._limits.num_drafts)
        full = chain.copy()
        full[:, : parents.shape[1]] = parents[:, : full.shape[1]]
        return ids, None if (full == chain).all() else full

    def _verify_drawn(
        self, places: Places, drafts: Ints, which: npt.NDArray[np.int64], q_RKV: torch.Tensor, edited_NV: torch.Tensor
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Return [R', K] which drafts are kept, and the tokens behind them, of the rows ``which``."""
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
        ids, q_RKV, kept = send(drafts[which, :width]), q_RKV[:, :width], np.zeros(drafts[which].shape, dtype=np.bool_)
        if places.parents is None:
            count, last = keep_drawn(p_RKV, q_RKV, ids, send(counts), u_RK, u_last_RK, self._limits.method)
            kept[:, :width] = np.arange(width) < count.cpu().numpy()[:, None]
        else:
            parents = send(places.parents[which, :width])
            walked, last = walk_drawn(p_RKV, q_RKV, ids, parents, send(counts), u_RK, u_last_RK)
            kept[:, :width] = walked.cpu().numpy()
        return kept, last.cpu().numpy()


def _keep_certain(places: Places, drafts: Ints, sampled: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return [R, K] which drafts are what the target sampled in their place."""
    ids, counts = torch.from_numpy(drafts.astype(np.int64)), torch.from_numpy(places.drafts.astype(np.int64))
    if places.parents is not None:
        parents = torch.from_numpy(places.parents.astype(np.int64))
        walked: npt.NDArray[np.bool_] = walk_equal(ids, parents, torch.from_numpy(sampled), counts).numpy()
        return walked
    accepted = keep_equal(ids, torch.from_numpy(sampled[:, :-1]), counts).numpy()
    kept: npt.NDArray[np.bool_] = np.arange(drafts.shape[1]) < accepted[:, None]
    return kept
