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
from jackfield.scheduler.round_lengths import RoundLengths
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
        self._rounds: RoundLengths | None = None
        sizes, adaptive, largest = (
            (limits.max_num_seqs, limits.num_drafts),
            limits.adaptive_drafts,
            limits.largest_draft_batch,
        )
        self._lengths = DraftLengths(*sizes, adaptive=adaptive, largest_batch=largest)
        if limits.recordings.drafts:
            self._rounds = RoundLengths(*sizes, limits.recordings, adaptive=adaptive, largest_batch=largest)
        self._acceptance = (self._rounds or self._lengths).acceptance
        self._follows = limits.recordings.followed
        self._stale: Bools = np.ones(limits.max_num_seqs, dtype=np.bool_)
        """Sequences that the drafter has not seen all of: they get no drafts any more. So are slots that were never
        filled.
        """
        self._seen = False
        """Whether some sequence may not be stale."""
        self._drafted = False
        """Whether some sequence may have drafts. Both spare idle steps a look at all sequences."""
        self._asked: Ints = np.zeros(limits.max_num_seqs, dtype=np.int32)
        """Drafts that the last accounted round of each slot left."""
        self._last_round = -1
        self._began: dict[int, float] = {}
        self._ended = 0.0

    def begin(self, step: int) -> None:
        """Note that a step begins."""
        if self._width:
            self._began[step] = time.monotonic()

    def fill(self, slot: int, params: SamplingParams, sequences: int) -> None:
        """Begin a sequence, one of so many that run or wait."""
        steady = self._drawn and params.seed is not None and not params.is_greedy
        (self._rounds or self._lengths).fill(slot, steady=steady)
        self._stale[slot] = self._follows and self._rounds is not None and self._rounds.hopeless(sequences)
        self._seen |= not self._stale[slot]

    def settle(self, slots: Ints, counts: Ints, starts: Ints, retired: int) -> tuple[Bools, Ints | None, Ints | None]:
        """Return [B] which sequences of a step sample, [B] drafts of each, and [B] how many it may have next; None for
        both in a plain step, which may be a recorded one.

        Args:
            slots, counts, starts: [B]. retired: the last step that was accounted.
        """
        table, ends = self._table, starts + counts
        plain = self._rounds is not None and self._rounds.hopeless(len(slots)) and not self.in_flight(retired)
        if not self._width or (plain and not self._any_drafts()):
            return ends == table.known[slots], None, None
        drafts = np.minimum(table.num_drafts[slots], np.maximum(counts - 1, 0))
        samples = ends - drafts == table.known[slots]
        limits = self._limits(slots, samples)
        if len(slots) and (drafts.any() or limits.any() or self.in_flight(retired)):
            return samples, drafts, limits
        return samples, None, None

    def _any_drafts(self) -> bool:
        if self._drafted:
            self._drafted = bool(self._table.num_drafts.any())
        return self._drafted

    def _limits(self, slots: Ints, samples: Bools) -> Ints:
        """Return [B] most drafts to propose for each sequence after the step."""
        limits, mine = np.zeros(len(slots), dtype=np.int32), slots[samples]
        able = ~self._stale[mine]
        if not able.any():
            return limits
        wanted = self._lengths.choose(mine) if self._rounds is None else self._rounds.choose(mine, able)
        # The step gives a token at least: drafts past the end of a sequence could never be used.
        room = self._table.total[mine] - self._table.known[mine] - 2
        limits[samples] = np.clip(np.minimum(wanted, room), 0, None)
        return limits

    def unseen(self, slots: Ints, counts: Ints) -> Bools | None:
        """Return [B] which sequences the drafter need not be shown any more; None: it sees all, or nothing of a step of
        single tokens.
        """
        if not self._follows or not len(slots) or counts[-1] == 1:
            return None
        stale = self._stale[slots]
        return stale if stale.any() else None

    def in_flight(self, retired: int) -> bool:
        """Return whether a round was planned that is not accounted."""
        return self._rounds is not None and self._last_round > retired

    def planned(self, plan: SchedulerOutput) -> None:
        """Where rounds may be launched one behind the other, count drafts of a planned step as kept until it is
        accounted, and those that it asks for as proposed.
        """
        if plan.num_drafts is None:
            if self._seen and self._follows and len(plan.slots) and plan.counts[-1] == 1:
                self._stale[plan.slots] = True
                self._seen = not self._stale.all()
            return
        table, slots = self._table, plan.slots
        if self._rounds is None or plan.draft_limits is None:
            return
        table.known[slots] += plan.num_drafts
        if self._is_round(plan):
            self._last_round, self._drafted = plan.step_id, True
            room = table.total[slots] - table.known[slots] - 1
            table.num_drafts[slots] = np.clip(np.minimum(plan.draft_limits, room), 0, None)

    def is_certain(self, plan: SchedulerOutput) -> bool:
        """Return whether it is known where a planned step's sequences stand behind it, and that none has drafts then:
        where rounds draft, other steps do not.
        """
        drafts = plan.num_drafts
        if drafts is None or self._rounds is None:
            return drafts is None
        return self._rounds.fits(len(plan.slots)) and not drafts.any() and not self._is_round(plan)

    def _is_round(self, plan: SchedulerOutput) -> bool:
        """Return whether a step is a recorded round."""
        return self._rounds is not None and self._rounds.fits(len(plan.slots)) and plan.is_round

    def measure(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Learn what steps of running sequences cost."""
        now, last = time.monotonic(), self._ended
        began, self._ended = max(self._began.pop(plan.step_id, now), last), now
        # What steps of too many sequences for drafts take is nobody's question.
        idle = self._rounds is not None and self._rounds.hopeless(len(plan.slots))
        if not self._width or idle or not len(plan.slots) or plan.new or not plan.samples.all():
            return
        seconds = now - began
        if self._rounds is not None:
            self._rounds.measure(len(plan.slots), seconds, drafts=plan.num_drafts is not None)
            return
        self._lengths.cost.add(plan.num_tokens, seconds - result.draft_seconds)
        if plan.draft_limits is not None and plan.draft_limits.any():
            self._lengths.cost.add_drafting(int(plan.draft_limits.max()), result.draft_seconds)

    def account(self, plan: SchedulerOutput, alive: Bools, accepted: Ints) -> None:
        """Take back what was planned for drafts that were refused, and count those that were kept. A model with
        recurrent states goes back to before the step.

        Args:
            alive, accepted: [R] of the sequences that sampled.
        """
        assert plan.num_drafts is not None, "the step had drafts"
        slots, accepted = plan.slots[plan.samples][alive], accepted[alive]
        drafts, counts = (part[plan.samples][alive] for part in (plan.num_drafts, plan.counts))
        refused = drafts - accepted
        self._table.computed[slots] -= np.where(refused > 0, counts, 0) if self._stateful else refused
        self._table.known[slots] += accepted if self._rounds is None else -refused
        if plan.ahead:
            drafts = np.minimum(drafts, self._asked[slots])  # only the device knew that there were fewer
        self._acceptance.observe(slots, drafts, accepted)
        totals = np.stack((drafts > 0, drafts, accepted), axis=1).astype(np.int32)
        self._table.draft_totals[slots] += totals
        rounds, proposed, kept = totals.sum(axis=0).tolist()
        self._counters.draft_rounds += rounds
        self._counters.drafts_proposed += proposed
        self._counters.drafts_accepted += kept
        places = (accepted[:, None] > np.arange(self._width)).sum(axis=0).tolist()
        before = self._counters.accepted_per_position or [0] * len(places)
        self._counters.accepted_per_position = [a + b for a, b in zip(before, places, strict=True)]

    def take(self, plan: SchedulerOutput, alive: Bools, drafts: Ints | None, parents: Ints | None = None) -> None:
        """Keep the drafts [R, K] for the next step, and the parents of those that branch. Sequences that are in a later
        step already have theirs.
        """
        if drafts is None and not self._any_drafts():
            return
        table, rows = self._table, plan.slots[plan.samples]
        if drafts is not None:
            self._drafted = True
            self._asked[rows[alive]] = (drafts[alive] >= 0).sum(axis=1)
        alive = alive & (table.last_step[rows] == plan.step_id)
        slots = rows[alive]
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
