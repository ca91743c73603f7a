"""What the scheduler does for drafts: how many there may be, and what follows from how many were kept.

Legend: B sequences of a step, R rows that sample, K drafts.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from jackfield.protocol import CoreCounters, ModelRunnerOutput, SamplingParams, SchedulerOutput
from jackfield.scheduler.draft import SchedulerLimits
from jackfield.scheduler.draft_lengths import DraftLengths
from jackfield.scheduler.table import SlotTable

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


class Drafting:
    """Keeps the table and the counters right.

    Args:
        limits: of the scheduler. table, counters: its own. stateful: whether the model has recurrent states.
    """

    def __init__(
        self, limits: SchedulerLimits, table: SlotTable, counters: CoreCounters, *, stateful: bool = False
    ) -> None:
        self._table, self._counters, self._stateful = table, counters, stateful
        self._width, self._drawn = limits.num_drafts, limits.drafts_drawn
        self._lengths = DraftLengths(
            limits.max_num_seqs,
            limits.num_drafts,
            adaptive=limits.adaptive_drafts,
            largest_batch=limits.largest_draft_batch,
        )
        self._began = 0.0

    def begin(self) -> None:
        """Note that a step begins."""
        self._began = time.monotonic()

    def fill(self, slot: int, params: SamplingParams) -> None:
        """Begin a sequence."""
        steady = self._drawn and params.seed is not None and not params.is_greedy
        self._lengths.fill(slot, steady=steady)

    def limits_of(self, slots: Ints, samples: Bools) -> Ints:
        """Return [B] most drafts to propose for each sequence after the step."""
        limits = np.zeros(len(slots), dtype=np.int32)
        wanted = self._lengths.choose(slots[samples])
        # The step gives a token at least: drafts past the end of a sequence could never be used.
        room = self._table.total[slots[samples]] - self._table.known[slots[samples]] - 2
        limits[samples] = np.clip(np.minimum(wanted, room), 0, None)
        return limits

    def measure(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Learn what steps of running sequences cost."""
        if not self._width or not len(plan.slots) or plan.new or not plan.samples.all():
            return
        seconds = time.monotonic() - self._began
        self._lengths.cost.add(plan.num_tokens, seconds - result.draft_seconds)
        if plan.draft_limits is not None and plan.draft_limits.any():
            self._lengths.cost.add_drafting(int(plan.draft_limits.max()), result.draft_seconds)

    def account(self, rows: Ints, alive: Bools, accepted: Ints, drafts: Ints, counts: Ints) -> None:
        """Take back what was planned for drafts that were refused, and count those that were kept. A model with
        recurrent states goes back to before the step.

        Args:
            rows: [R] slots. alive, accepted, drafts, counts: [R] of each, ``counts`` all tokens of the step.
        """
        slots = rows[alive]
        refused = drafts - accepted
        if self._stateful:
            refused = np.where(refused > 0, counts, 0)
        drafts, accepted = drafts[alive], accepted[alive]
        self._table.computed[slots] -= refused[alive]
        self._table.known[slots] += accepted
        self._lengths.observe(slots, drafts, accepted)
        totals = np.stack((drafts > 0, drafts, accepted), axis=1).astype(np.int32)
        self._table.draft_totals[slots] += totals
        rounds, proposed, kept = totals.sum(axis=0).tolist()
        self._counters.draft_rounds += rounds
        self._counters.drafts_proposed += proposed
        self._counters.drafts_accepted += kept
        places = (accepted[:, None] > np.arange(self._width)).sum(axis=0).tolist()
        before = self._counters.accepted_per_position or [0] * len(places)
        self._counters.accepted_per_position = [a + b for a, b in zip(before, places, strict=True)]

    def take(self, rows: Ints, alive: Bools, drafts: Ints | None, parents: Ints | None = None) -> None:
        """Keep the drafts [R, K] for the next step, and the parents of those that branch."""
        table, slots = self._table, rows[alive]
        if table.draft_parents is None and parents is not None:
            table.draft_parents = np.full(table.drafts.shape, -1, dtype=np.int32)
        if table.draft_parents is not None:
            chain = np.arange(-1, table.drafts.shape[1] - 1, dtype=np.int32)
            table.draft_parents[slots] = chain if parents is None else parents[alive]
        if drafts is None:
            table.num_drafts[slots] = 0
            return
        table.drafts[slots, : drafts.shape[1]] = drafts[alive]
        counts = (drafts[alive] >= 0).sum(axis=1)
        # Drafts past the end of a sequence could never be used.
        counts = np.clip(np.minimum(counts, table.total[slots] - table.known[slots] - 1), 0, None)
        if self._stateful:
            # What is computed again leaves a state behind only where nothing can be refused again.
            counts[table.known[slots] - table.computed[slots] > 1] = 0
        table.num_drafts[slots] = counts

    def parents_of(self, slots: Ints, num_drafts: Ints | None) -> Ints | None:
        """Return [B, K] the parents of a step's drafts, or None where none branch."""
        parents = self._table.draft_parents
        if parents is None or num_drafts is None:
            return None
        mine = parents[slots]
        place = np.arange(mine.shape[1])
        branching = (mine != place - 1) & (place < num_drafts[:, None])
        return mine if branching.any() else None

    def totals(self, slot: int) -> tuple[int, int, int]:
        """Return rounds, drafts verified and drafts kept of a running sequence."""
        rounds, proposed, accepted = self._table.draft_totals[slot].tolist()
        return rounds, proposed, accepted
