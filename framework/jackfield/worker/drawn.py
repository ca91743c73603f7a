"""Drafts drawn from a draft model's distribution, and those distributions until the drafts are verified.

Legend: B sequences, K drafts, V vocabulary, D sequences that draw (not greedy).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from jackfield.sampling import Sampler
from jackfield.sampling.draw import invert
from jackfield.sampling.random import stream, uniform
from jackfield.worker.transfer import Transfer

Ints = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]
DRAFTING = 1
"""Number of the stream of random numbers that drafts are drawn by."""
SLACK = 1e-3
"""How far from 1 a distribution's sum may be."""


@dataclass(slots=True)
class Drawn:
    """The drafts of one proposal that were drawn.

    Args:
        slots: [D]. known: [D] tokens before the first draft; -1 where the sequence is gone. probabilities: [D, K, V]
            that drafts were drawn from.
    """

    slots: Ints
    known: Ints
    probabilities: torch.Tensor

    def forget(self, slots: list[int]) -> None:
        """Drop sequences that gave up their slots."""
        self.known[np.isin(self.slots, slots)] = -1

    def reorder(self, orders: Mapping[int, Rows]) -> None:
        """Follow drafts that were put in another order: by slot which draft [K] came to each place."""
        if not len(self.slots):
            return
        order = torch.from_numpy(np.stack([orders[int(slot)] for slot in self.slots])).to(self.probabilities.device)
        rows = torch.arange(len(order), device=order.device).unsqueeze(1)
        self.probabilities = self.probabilities[rows, order]

    def find(self, slots: Ints, known: Ints, drafts: Ints) -> tuple[Rows, Rows]:
        """Return which of the given sequences have drafts of this proposal, and their places [D] in it.

        Args:
            slots, known: [R]. drafts: [R] drafts of each.
        """
        order = np.argsort(self.slots)
        at = np.searchsorted(self.slots, slots, sorter=order).clip(max=len(order) - 1)
        mine = order[at]
        same = (self.slots[mine] == slots) & (self.known[mine] == known)
        which = np.flatnonzero(same & (drafts > 0) & (drafts <= self.probabilities.shape[1]))
        return which, mine[which]


class DraftDraws:
    """Implements :class:`jackfield.interfaces.DraftDraw` for one proposal. Where drafts branch, each is a place.

    Args:
        sampler: of the target: drafts are drawn by their requests' temperature, min_p, top_k and top_p. slots: [B].
            lengths: [B] tokens of each sequence. greedy: take the largest logit for all.
    """

    def __init__(
        self, sampler: Sampler, slots: Ints, lengths: Ints, transfer: Transfer, *, greedy: bool = False
    ) -> None:
        self._sampler, self._slots, self._lengths, self._transfer = sampler, slots, lengths, transfer
        self._random = np.flatnonzero(~sampler.state.greedy[slots])
        self._drawing = self._random[:0] if greedy else self._random
        self._ids: list[torch.Tensor] = []
        self._probabilities: list[torch.Tensor] = []

    def __call__(self, logits_BV: torch.Tensor, place: int) -> torch.Tensor:
        """See DraftDraw."""
        if place != len(self._ids):
            raise ValueError(f"place {place} is drawn, but place {len(self._ids)} is next")
        ids = logits_BV.argmax(-1)
        if len(self._drawing):
            send = self._transfer.send_index
            which, slots = send(self._drawing), self._slots[self._drawing]
            probabilities = self._sampler.distribution(logits_BV[which], slots)
            # Numbers of a round are used in no other: which drafts were kept may depend on all of them.
            seeds = stream(self._sampler.state.seeds[send(slots)], DRAFTING, send(self._lengths[self._drawing]))
            ids[which] = invert(probabilities, uniform(seeds, torch.full_like(seeds, place)))
            self._probabilities.append(probabilities)
        self._ids.append(ids)
        return ids

    def drawn(self, ids: npt.NDArray[np.integer], given: torch.Tensor | None, vocab_size: int) -> Drawn | None:
        """Return what the drafts [B, K] were drawn from, where they were.

        Args:
            ids: as the drafter returned them. given: [B, K, V] of a drafter that drew by itself, or None.

        Raises:
            ValueError: ``given`` is no distribution, or ``ids`` are not what was drawn: then their distribution is
                not known.
        """
        if given is not None:
            return self._given(ids, given, vocab_size)
        if not self._probabilities:
            return None
        own = torch.stack(self._ids, 1)[self._transfer.send_index(self._drawing)].cpu().numpy()
        mine = ids[self._drawing]
        if mine.shape != own.shape or ((mine >= 0) & (mine != own)).any():
            raise ValueError("drafts are not the ids that were drawn for them")
        return self._of(self._drawing, torch.stack(self._probabilities, 1))

    def _of(self, rows: Rows, probabilities: torch.Tensor) -> Drawn:
        return Drawn(self._slots[rows], self._lengths[rows].astype(np.int32), probabilities)

    def _given(self, ids: npt.NDArray[np.integer], given: torch.Tensor, vocab_size: int) -> Drawn | None:
        if tuple(given.shape) != (*ids.shape, vocab_size):
            raise ValueError(f"probabilities of drafts are {[*ids.shape, vocab_size]}, not {list(given.shape)}")
        if not len(self._random):
            return None
        mine = given[self._transfer.send_index(self._random)].float()
        _check_distribution(mine, self._transfer.send_index(ids[self._random]))
        return self._of(self._random, mine)


def _check_distribution(probabilities_DKV: torch.Tensor, ids_DK: torch.Tensor) -> None:
    there = ids_DK >= 0
    wrong = ((probabilities_DKV.double().sum(2) - 1.0).abs() < SLACK).logical_not_() | (probabilities_DKV < 0).any(2)
    if bool((wrong & there).any()):
        raise ValueError("the probabilities of a draft are no distribution: they are negative or do not sum to 1")
    chosen = probabilities_DKV.gather(2, ids_DK.clamp(0, probabilities_DKV.shape[2] - 1).unsqueeze(2)).squeeze(2)
    if bool(((chosen <= 0) & there).any()):
        raise ValueError("a draft has probability 0 in the distribution that it was drawn from")
