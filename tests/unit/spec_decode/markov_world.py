"""A target and a draft model whose next token depends on the last one alone, so that every probability is known.

Legend: N sequences, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import DraftBatch, Drafter, DrafterEnv, Drafts
from jackfield.protocol import NewSequence, SamplingParams, SchedulerOutput
from jackfield.sampling import Sampler, SamplingState
from jackfield.sampling.sampler import SampleRows
from jackfield.sampling.verification import VerificationMethod
from jackfield.worker.speculation import Places, Speculation, SpeculationLimits
from jackfield.worker.transfer import Transfer

Floats = npt.NDArray[np.float64]
CPU = torch.device("cpu")
LENGTH = 24
START = 0


class MarkovDrafter(Drafter):
    """Draws by a table of logits [V, V]; with ``own`` it draws by itself and returns the probabilities."""

    name = "markov"
    kinds: ClassVar[frozenset[str]] = frozenset({"markov"})

    def __init__(self, table_VV: torch.Tensor, width: int, *, own: bool = False) -> None:
        self._table, self._width, self._own = table_VV, width, own
        self._generator = torch.Generator().manual_seed(5)

    @classmethod
    def build(cls, env: DrafterEnv) -> MarkovDrafter:
        raise NotImplementedError

    def propose(self, batch: DraftBatch) -> Drafts:
        assert batch.token_ids is not None and batch.draw is not None
        last = torch.from_numpy(batch.token_ids[batch.slots, batch.lengths - 1].astype(np.int64))
        ids, probabilities = [], []
        for place in range(self._width):
            logits = self._table[last]
            if self._own:
                probabilities.append(logits.softmax(-1))
                last = torch.multinomial(probabilities[-1], 1, generator=self._generator).squeeze(1)
            else:
                last = batch.draw(logits, place)
            ids.append(last)
        return Drafts(torch.stack(ids, 1), probabilities=torch.stack(probabilities, 1) if self._own else None)


class MarkovWorld:
    """Sequences that all begin alike and differ in their seeds alone, grown by rounds of drafting and verification.

    Args:
        target_VV, draft: logits after each token, and who drafts. count: N. width: K.
    """

    def __init__(
        self,
        target_VV: torch.Tensor,
        draft: Drafter,
        count: int,
        width: int,
        method: VerificationMethod = "standard",
        *,
        seed: int = 0,
        **params: Any,
    ) -> None:
        self.target = target_VV
        wanted = SamplingParams(**params)
        self.state = _state(count, wanted, seed)
        self.sampler = Sampler(self.state)
        limits = SpeculationLimits(width, LENGTH, len(target_VV), method, branches=True)
        self.speculation = Speculation(draft, self.sampler, limits, count, Transfer(CPU))
        self.slots = np.arange(count, dtype=np.int32)
        self.tokens = torch.zeros((count, LENGTH + width + 2), dtype=torch.int32)
        self.known = np.ones(count, dtype=np.int32)
        self.drafts: npt.NDArray[np.int32] | None = None
        self.parents: npt.NDArray[np.int32] | None = None
        self.kept: list[float] = []
        self.speculation.fill([_new(slot, wanted, seed) for slot in range(count)])

    def run(self, length: int) -> npt.NDArray[np.int64]:
        """Return [N, length] the first tokens behind the start."""
        while self.known.min() < 1 + length:
            self.round()
        return self.tokens[:, 1 : 1 + length].numpy().astype(np.int64)

    def round(self) -> None:
        """Verify what was drafted, and draft again; sequences that are long enough go on as the others do."""
        width = self.speculation._limits.num_drafts
        drafts = np.full((len(self.slots), width), -1, dtype=np.int32) if self.drafts is None else self.drafts
        counts = (drafts >= 0).sum(1).astype(np.int32)
        plan = SchedulerOutput(
            0, self.slots, self.known - 1, 1 + counts, np.ones(len(self.slots), dtype=np.bool_), drafts=drafts
        )
        plan.num_drafts, plan.draft_parents = counts, self.parents
        places = Places.of(plan)
        rows, at = np.nonzero(drafts >= 0)
        self.tokens[torch.from_numpy(rows), torch.from_numpy(self.known[rows] + at)] = torch.from_numpy(
            drafts[rows, at]
        )
        slots = places.slots[places.owner]
        # What is stored in front of a place need not be what the text has there: look at the draft itself.
        at = np.where(places.within > 0, places.known[places.owner] + places.within - 1, places.lengths - 1)
        before = self.tokens[torch.from_numpy(slots).long(), torch.from_numpy(at.astype(np.int64))].long()
        sample_rows = SampleRows(slots, torch.from_numpy(slots.astype(np.int64)), places.lengths, self.tokens)
        ids, edited = self.sampler.sample(self.target[before], sample_rows)
        verified = self.speculation.verify(plan, places, ids, edited)
        tokens, accepted = verified.tokens, verified.accepted
        row, place = np.nonzero(tokens >= 0)
        self.tokens[torch.from_numpy(row), torch.from_numpy(self.known[row] + place)] = torch.from_numpy(
            tokens[row, place]
        )
        if counts.any():
            self.kept.append(float(accepted.mean()))
        self.known = self.known + (tokens >= 0).sum(1, dtype=np.int32)
        self.drafts, self.parents = self.speculation.propose(self.slots, self.known, None) or (None, None)


def _new(slot: int, params: SamplingParams, seed: int) -> NewSequence:
    return NewSequence(slot, f"r{slot}", np.array([START], dtype=np.int32), 1, params, (), seed)


def _state(count: int, params: SamplingParams, seed: int) -> SamplingState:
    """Return a state in which all slots have the same parameters, and seeds of their own."""
    state = SamplingState(count, CPU)
    state.fill([_new(0, params, seed)])
    for values in (*state.host.values(), state.host_top_k, state.greedy, state.edits, state.penalized, state.prompts):
        values[:] = values[0]
    for values in (*state.numbers.values(), state.top_k):
        values[:] = values[0].clone()
    state.seeds[:] = torch.arange(count) + seed * 1_000_003
    return state


def joint(step: Callable[[Sequence[int]], Floats], vocab: int, length: int) -> Floats:
    """Return the probability of every sequence of ``length`` tokens, in lexicographic order; ``step`` gives the
    distribution behind the tokens so far.
    """
    found = []
    for tokens in itertools.product(range(vocab), repeat=length):
        share = 1.0
        for at, token in enumerate(tokens):
            share *= float(step(tokens[:at])[token]) if share else 0.0
        found.append(share)
    return np.array(found)


def frequencies(tokens: npt.NDArray[np.int64], vocab: int) -> npt.NDArray[np.int64]:
    """Return how often every sequence came out, in lexicographic order."""
    places = vocab ** np.arange(tokens.shape[1] - 1, -1, -1)
    return np.bincount(tokens @ places, minlength=vocab ** tokens.shape[1])


def chi_square(counts: npt.NDArray[np.int64], expected: Floats) -> tuple[float, float]:
    """Return the statistic over what can occur, and its 99.997 % quantile (Wilson and Hilferty 1931). Cells that are
    expected less than five times count together.
    """
    assert counts[expected == 0].sum() == 0, "something came out that cannot"
    mean = counts.sum() * expected
    large = mean >= 5
    observed = np.append(counts[large], counts[~large].sum()).astype(np.float64)
    mean = np.append(mean[large], mean[~large].sum())
    observed, mean = observed[mean > 0], mean[mean > 0]
    statistic = float((((observed - mean) ** 2) / mean).sum())
    freedom = len(mean) - 1
    third = 2 / (9 * freedom)
    return statistic, freedom * (1 - third + 4.0 * math.sqrt(third)) ** 3
