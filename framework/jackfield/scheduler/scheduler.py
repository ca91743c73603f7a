"""Scheduler: continuous batching under a token budget.

There is no prefill and no decode here: a sequence has tokens that are known and tokens that are computed, and a step
computes some of the difference. What
follows from that: prompts are chunked when the budget ends, decode goes on beside them, and a preempted sequence
simply has nothing computed again.

``schedule`` may be called again before ``update`` (overlapped stepping): sampled tokens that the host has not seen
count as known, and what a finished sequence
holds is freed only when the last step that may touch it has been accounted.
"""

from __future__ import annotations

import logging
import time
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from jackfield.interfaces import SchedulingPolicy
from jackfield.kv_cache import BlockHasher, KVCacheManager
from jackfield.protocol import (
    CoreCounters,
    CoreEvent,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
)
from jackfield.protocol.requests import PooledResult, TokenLogprobs
from jackfield.scheduler.draft import PlanDraft, SchedulerLimits
from jackfield.scheduler.drafting import Drafting
from jackfield.scheduler.ends import end_of, ended
from jackfield.scheduler.order import sort_key
from jackfield.scheduler.table import Sequence, SlotTable
from jackfield.scheduler.waiting import WaitingQueue

Ints = npt.NDArray[np.int32]

_logger = logging.getLogger("jackfield.scheduler")


class Scheduler:
    """Plans steps and accounts for their results.

    Args:
        limits: sizes of a step. cache: block tables. policy: the order of requests; None: first come, first served.
    """

    def __init__(self, limits: SchedulerLimits, cache: KVCacheManager, policy: SchedulingPolicy | None = None) -> None:
        self.limits = limits
        self.cache = cache
        self._room = limits.max_model_len
        self._stateful = any(group.is_state for group in cache.groups)
        self._policy = policy
        self._table = SlotTable(limits.max_num_seqs, limits.max_model_len + limits.num_drafts)
        self._table.ensure_drafts(limits.num_drafts)
        self._waiting = WaitingQueue()
        self._sequences: dict[str, Sequence] = {}
        self._by_slot: list[Sequence | None] = [None] * limits.max_num_seqs
        self._running: list[int] = []
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._released: list[int] = []
        self._leaving: list[tuple[int, int]] = []
        self._step = 0
        self._retired = -1
        self._last_work = -1
        self.counters = CoreCounters()
        self._drafting = Drafting(limits, self._table, self.counters, stateful=self._stateful)
        self.paused = False
        """While set, plans are empty: what is in flight ends, requests stay where they are."""
        self._pending_events: list[CoreEvent] = []
        self._scored: dict[str, list[TokenLogprobs]] = {}

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a request. Its sizes were checked by the input processor. One that the policy cannot order ends with an
        error event.
        """
        try:
            key = sort_key(self._policy, request)
        except Exception as error:
            _logger.exception("request %s cannot be ordered", request.request_id)
            text = f"the scheduling policy cannot order it: {type(error).__name__}: {error}"
            self._pending_events.append(CoreEvent(request.request_id, [], FinishReason.ERROR, error=text))
            return
        features = tuple((feature.position, feature.hash) for feature in request.features or ())
        hasher = BlockHasher(self.cache.block_size, request.cache_salt, request.adapter, features)
        # Python's cycle collector looks at every item of every list: the prompts of ten thousand waiting requests, kept
        # as lists, would stop a step for 50 ms now and then.
        prompt = np.array(request.prompt_token_ids, dtype=np.int32)
        sequence = Sequence(replace(request, prompt_token_ids=[]), key, hasher, prompt)
        self._sequences[request.request_id] = sequence
        self._waiting.push(sequence)

    def abort(self, request_id: str) -> bool:
        """End a request now; returns False when it is unknown or already over."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if sequence.slot >= 0:
            self._leave(sequence.slot)
        else:
            sequence.aborted = True
        del self._sequences[request_id]
        self._pending_events.append(CoreEvent(request_id, [], FinishReason.ABORT))
        return True

    def has_work(self) -> bool:
        """Return whether any request lives, or events wait to be told. While paused, requests are no work, but a step
        in flight is.
        """
        busy = self._last_work > self._retired if self.paused else bool(self._sequences)
        return bool(busy or self._pending_events or self._leaving)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for one."""
        return len(self._sequences) - len(self._running)

    @property
    def steps_in_flight(self) -> int:
        """Steps that were planned and not yet accounted."""
        return self._step - 1 - self._retired

    def awaits(self, plan: SchedulerOutput, leads: bool) -> bool:
        """Return whether a step in flight must be accounted before the next is planned: where its drafts decide what
        the next one is. A round that ``leads`` tells the device all that another round of its sequences needs.
        """
        if self._drafting.is_certain(plan):
            return False
        steady = leads and not self.paused and not (self._free_slots and self._waiting.first())
        wanted = plan.draft_limits is not None and bool(plan.draft_limits.any())
        return not (steady and wanted and set(self._running) <= set(plan.slots.tolist()))

    @property
    def token_table(self) -> Ints:
        """[slots, length] tokens as the host knows them."""
        return self._table.tokens

    # -- schedule ------------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Return the plan of the next step; it may be empty."""
        self._drafting.begin(self._step)
        draft = PlanDraft(self.limits.max_num_batched_tokens)
        draft.blocks = [([], [], []) for _ in self.cache.groups]
        if not self.paused:
            self._plan_running(draft)
            self._admit_waiting(draft)
        return self._finish_plan(draft)

    def _plan_running(self, draft: PlanDraft) -> None:
        table = self._table
        running = np.array(self._running, dtype=np.int32)
        if not len(running):
            return
        needs = table.known[running] - table.computed[running]
        needs[table.known[running] >= table.total[running]] = 0
        wants = needs + np.where(needs > 0, table.num_drafts[running], 0)
        if int(wants.max()) <= 1 and int(wants.sum()) <= draft.budget:
            planned, counts = running[wants > 0], wants[wants > 0]
        else:
            planned, counts = self._share_budget(running, wants, draft.budget)
        ends = np.minimum(table.computed[planned] + counts, self._room)
        short = self.cache.short(planned, ends, np.minimum(self.limits.lookahead, self._room - ends))
        if not short.any():
            draft.slots, draft.counts = planned.tolist(), counts.tolist()
            draft.budget -= int(counts.sum())
            return
        for slot, count, grows in zip(planned.tolist(), counts.tolist(), short.tolist(), strict=True):
            if not table.alive[slot]:
                continue  # preempted for one before it
            drafts = int(table.num_drafts[slot])
            if grows and 0 < drafts < count and not self.cache.has_room(slot, *self._target(slot, count)):
                # Somebody else's place is worth more than drafts.
                table.num_drafts[slot], count = 0, count - drafts
            if not grows or self._grow(slot, count, draft):
                draft.add(slot, count)

    def _share_budget(self, running: Ints, wants: Ints, budget: int) -> tuple[Ints, Ints]:
        """Give tokens in running order until the budget ends; prompts are cut, drafts are all or nothing."""
        slots, counts = [], []
        for slot, want in zip(running.tolist(), wants.tolist(), strict=True):
            computed = int(self._table.computed[slot])
            count = self._cap(want, budget, computed)
            drafts = int(self._table.num_drafts[slot])
            if drafts and (count < want or not self._may_go_back(computed, want)):
                self._table.num_drafts[slot] = 0
                count = self._cap(want - drafts, budget, computed)
            if count > 0:
                slots.append(slot)
                counts.append(count)
                budget -= count
        return np.array(slots, dtype=np.int32), np.array(counts, dtype=np.int32)

    def _may_go_back(self, computed: int, want: int) -> bool:
        """Return whether drafts may be refused: of a recurrent state only the one at the end of each block is kept, so
        steps that may go back stay in one block.
        """
        return not self._stateful or computed % self.cache.block_size + want <= self.cache.block_size

    def _cap(self, want: int, budget: int, computed: int) -> int:
        """Return how many of the ``want`` tokens behind ``computed`` ones go into this step."""
        if want > 1 and not self.limits.chunked_prefill:
            return want if want <= budget else 0
        threshold = self.limits.long_prefill_threshold
        return self.cache.cut(computed, min(want, budget, threshold or want))

    def _grow(self, slot: int, count: int, draft: PlanDraft) -> bool:
        """Get blocks for ``count`` more tokens, preempting others if needed; False when the slot must wait or was
        preempted itself.
        """
        end, ahead = self._target(slot, count)
        firsts = [len(self.cache.table(slot, g)) for g in range(len(self.cache.groups))]
        while True:
            added = self.cache.grow(slot, end, ahead)
            if added is not None:
                draft.note_blocks(slot, firsts, added)
                return True
            if self._last_work > self._retired:
                return False  # what is leaving or in flight is freed soon; empty steps in flight free nothing
            victim = self._victim(draft)
            self._preempt(victim)
            if victim == slot:
                return False

    def _target(self, slot: int, count: int) -> tuple[int, int]:
        """Return for how many tokens a slot needs room when ``count`` more are computed, and how many behind them."""
        end = min(int(self._table.computed[slot]) + count, self._room)
        return end, min(self.limits.lookahead, self._room - end)

    def _victim(self, draft: PlanDraft) -> int:
        """Return the running slot that goes first: the largest key that is not in the plan already."""
        planned = set(draft.slots)
        return max((s for s in self._running if s not in planned), key=lambda s: self._sequence(s).key)

    def _preempt(self, slot: int) -> None:
        sequence = self._sequence(slot)
        count, prompt = int(self._table.confirmed[slot]), int(self._table.prompt[slot])
        sequence.output = self._table.tokens[slot, prompt:count].tolist()
        sequence.preemptions += 1
        sequence.draft_totals = self._drafting.totals(slot)
        self.counters.preemptions += 1
        self._leave(slot)
        sequence.slot = -1
        self._waiting.push(sequence)

    def _admit_waiting(self, draft: PlanDraft) -> None:
        while self._free_slots and draft.budget > 0:
            sequence = self._waiting.first()
            if sequence is None or not self._admit(sequence, draft):
                return
            self._waiting.pop()

    def _admit(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """Give a waiting sequence a slot and its first tokens; False when there is no room for it now."""
        tokens = np.concatenate((sequence.prompt, np.array(sequence.output, dtype=np.int32)))
        if self.cache.caching:
            sequence.hasher.extend(tokens)
        # A prompt of which more than the last hidden state is wanted must be computed whole: nothing of it is taken
        # from the cache.
        encoder = sequence.request.encoder_tokens
        hit = self.cache.find_prefix(sequence.hasher, 1 if sequence.wants_whole else len(tokens))
        count = self._cap(len(tokens) - hit.tokens, draft.budget, hit.tokens)
        # Reserving room for all that is known (and one more) keeps a newcomer from pushing out those that run.
        if count <= 0 or not self.cache.can_admit(
            hit, min(len(tokens) + 1 + self.limits.lookahead, self._room), encoder
        ):
            return False
        slot = self._free_slots.pop()
        self._by_slot[slot] = sequence
        self._running.append(slot)
        sequence.slot = slot
        self._table.fill(slot, sequence)
        self._table.computed[slot] = hit.tokens
        self._drafting.fill(slot, sequence.request.sampling_params, len(self._sequences))
        if sequence.cached < 0:
            sequence.cached = hit.tokens
            sequence.scheduled = time.monotonic()
        if self.cache.caching and not sequence.wants_whole:
            self.counters.prefix_queries += len(tokens)
            self.counters.prefix_hits += hit.tokens
        if sequence.wants_scores:
            sequence.scores = []
        self.cache.admit(slot, hit, encoder)
        added = self.cache.grow(slot, *self._target(slot, count))
        assert added is not None, "admission was reserved"
        draft.note_blocks(slot, [0] * len(added), [list(self.cache.table(slot, g)) for g in range(len(added))])
        draft.new.append(sequence.taking(slot, tokens))
        draft.add(slot, count)
        return True

    def _finish_plan(self, draft: PlanDraft) -> SchedulerOutput:
        table = self._table
        counts = np.array(draft.counts, dtype=np.int32)
        order = np.argsort(counts != 1, kind="stable")
        slots = np.array(draft.slots, dtype=np.int32)[order]
        counts = counts[order]
        starts = table.computed[slots]
        samples, num_drafts, draft_limits = self._drafting.settle(slots, counts, starts, self._retired)
        plan = SchedulerOutput(
            step_id=self._step,
            slots=slots,
            starts=starts,
            counts=counts,
            samples=samples,
            new=draft.new,
            released=self._released,
            blocks=[(_ints(a), _ints(b), _ints(c)) for a, b, c in draft.blocks],
            drafts=table.drafts[slots] if num_drafts is not None else None,
            num_drafts=num_drafts,
            draft_parents=self._drafting.parents_of(slots, num_drafts),
            draft_limits=draft_limits,
            ahead=num_drafts is not None and self._drafting.in_flight(self._retired),
            unseen=self._drafting.unseen(slots, counts),
        )
        table.computed[slots] += counts
        table.known[slots[samples]] += 1
        self._drafting.planned(plan)
        table.last_step[slots] = self._step
        self._released = []
        if len(slots):
            self._last_work = self._step
        self._step += 1
        return plan

    # -- update --------------------------------------------------------------------------------------------------------

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutput:
        """Account for a finished step and return what happened to its requests."""
        assert plan.step_id == self._retired + 1, "steps are accounted in order"
        table = self._table
        self._retired = plan.step_id
        rows = plan.slots[plan.samples]
        self._drafting.measure(plan, result)
        tokens = np.asarray(result.sampled.token_ids, dtype=np.int32)
        events, self._pending_events = self._pending_events, []
        self._take_scores(result)
        events += [self._fail(slot, why) for slot, why in (result.failures or {}).items() if table.alive[slot]]
        if result.pooled is not None:
            events += [self._deliver(slot, pooled) for slot, pooled in result.pooled.items() if table.alive[slot]]
        elif len(rows):
            events += self._account(plan, rows, tokens, result)
        for event in events if self._scored else ():
            event.prompt_logprobs = self._scored.pop(event.request_id, None)
        self._publish(plan.slots[table.alive[plan.slots]])
        self._free_retired()
        return EngineCoreOutput(
            events,
            self.num_running,
            self.num_waiting,
            self.cache.pool.num_free,
            self.cache.take_events(),
            copy(self.counters),
            plan.num_tokens,
        )

    def _account(self, plan: SchedulerOutput, rows: Ints, tokens: Ints, result: ModelRunnerOutput) -> list[CoreEvent]:
        table = self._table
        alive = table.alive[rows].copy()
        accepted = (tokens[:, 1:] >= 0).sum(axis=1, dtype=np.int32) if tokens.shape[1] > 1 else None
        if accepted is not None and plan.num_drafts is not None:
            self._drafting.account(plan, alive, accepted)
        self._drafting.take(plan, alive, result.next_drafts, result.next_parents)
        logprobs = result.sampled.logprobs
        events: list[CoreEvent] = []
        single = tokens[:, 0]
        slots = rows[alive]
        if accepted is None and logprobs is None:
            new = single[alive]
            table.tokens[slots, table.confirmed[slots]] = new
            table.confirmed[slots] += 1
            stopped = ended(table, slots, new)
            for slot, token in zip(slots.tolist(), new.tolist(), strict=True):
                events.append(CoreEvent(self._sequence(slot).request.request_id, [token]))
            for at in np.flatnonzero(stopped).tolist():
                self._finish(int(slots[at]), events[at])
        else:
            for row in np.flatnonzero(alive).tolist():
                events.append(self._account_row(int(rows[row]), tokens[row], logprobs[row] if logprobs else None))
        return events

    def _deliver(self, slot: int, pooled: PooledResult) -> CoreEvent:
        """End a pooling request with its result."""
        sequence = self._sequence(slot)
        name = sequence.request.request_id
        self._publish(np.array([slot], dtype=np.int32))
        del self._sequences[name]
        self._leave(slot)
        cached, scheduled = max(0, sequence.cached), sequence.scheduled
        return CoreEvent(name, [], FinishReason.STOP, cached_tokens=cached, pooled=pooled, scheduled=scheduled)

    def _fail(self, slot: int, why: str) -> CoreEvent:
        """End a request that cannot go on."""
        name = self._sequence(slot).request.request_id
        del self._sequences[name]
        self._leave(slot)
        return CoreEvent(name, [], FinishReason.ERROR, error=why)

    def _take_scores(self, result: ModelRunnerOutput) -> None:
        """Collect scores of prompt tokens; those of complete prompts wait for their request's next event."""
        for slot, scores in (result.prompt_logprobs or {}).items():
            if self._table.alive[slot]:
                sequence = self._sequence(slot)
                sequence.scores += scores
                if not sequence.wants_scores:
                    # The last prompt token predicts no prompt token: it may be computed, and sampled behind, later.
                    self._scored[sequence.request.request_id] = sequence.scores

    def _account_row(self, slot: int, tokens: Ints, logprobs: list[Any] | None) -> CoreEvent:
        """Take several tokens of one sequence, up to the first that ends it."""
        table = self._table
        event = CoreEvent(self._sequence(slot).request.request_id, [], logprobs=[] if logprobs is not None else None)
        for index, token in enumerate(tokens[tokens >= 0].tolist()):
            table.tokens[slot, table.confirmed[slot]] = token
            table.confirmed[slot] += 1
            event.token_ids.append(token)
            if logprobs is not None and event.logprobs is not None:
                event.logprobs.append(logprobs[index])
            one = np.array([slot], dtype=np.int32)
            if ended(table, one, np.array([token]))[0]:
                self._finish(slot, event)
                break
        return event

    def _finish(self, slot: int, event: CoreEvent) -> None:
        request = self._sequence(slot).request
        event.finish, event.stop_reason = end_of(self._table, slot, event.token_ids[-1], request.eos_token_ids)
        event.cached_tokens = max(0, self._sequence(slot).cached)
        event.scheduled = self._sequence(slot).scheduled
        event.drafts = self._drafting.totals(slot)
        self._publish(np.array([slot], dtype=np.int32))
        del self._sequences[request.request_id]
        self._leave(slot)

    def _publish(self, slots: Ints) -> None:
        """Publish blocks that became full and free those behind windows, for sequences that crossed a block border."""
        table = self._table
        full = np.minimum(table.computed[slots], table.confirmed[slots]) // self.cache.block_size
        crossed = full > table.full_blocks[slots]
        for slot, blocks in zip(slots[crossed].tolist(), full[crossed].tolist(), strict=True):
            count = blocks * self.cache.block_size
            if self.cache.caching:
                hasher = self._sequence(slot).hasher
                hasher.extend(table.tokens[slot, :count])
                self.cache.publish(slot, hasher, count, table.tokens[slot])
            self.cache.release_windows(slot, count)
            table.full_blocks[slot] = blocks

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _leave(self, slot: int) -> None:
        """Take a slot out of the running set; what it holds is freed once no planned step can touch it."""
        self._table.alive[slot] = False
        self._table.repetition.pop(slot, None)
        self._running.remove(slot)
        self._leaving.append((int(self._table.last_step[slot]), slot))
        self._free_retired()

    def _free_retired(self) -> None:
        staying = []
        for last_step, slot in self._leaving:
            if last_step > self._retired:
                staying.append((last_step, slot))
                continue
            self.cache.release(slot)
            self._by_slot[slot] = None
            self._table.last_step[slot] = -1
            self._free_slots.append(slot)
            self._released.append(slot)
        self._leaving = staying

    def _sequence(self, slot: int) -> Sequence:
        sequence = self._by_slot[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence

    def check_idle(self) -> None:
        """Raise AssertionError unless nothing is held while nothing lives."""
        assert not self._sequences and not self._running and not self._leaving, "requests are left"
        assert len(self._free_slots) == self.limits.max_num_seqs, "slots are lost"
        self.cache.check_idle()


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int32)
