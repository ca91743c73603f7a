"""A runner without a model: what it "computes" is checked against what was said, and what it "samples" is a function
of (request, position).

Every cell of its cache holds the whole sequence up to that token, so a block that was given to two sequences, freed
too early, found under a wrong prefix or never written is seen as soon as anybody reads it.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from jackfield.kv_cache import CacheGroup, KVCacheManager, Retention
from jackfield.kv_cache.planning import sequence_blocks
from jackfield.protocol import (
    CoreEvent,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    NewSequence,
    SamplerOutput,
    SamplingParams,
    SchedulerOutput,
)
from jackfield.protocol.requests import TokenLogprobs
from jackfield.scheduler import Scheduler, SchedulerLimits
from jackfield.scheduler.order import request_view
from jackfield_scheduling.policies import Fcfs, Priority

POLICIES = {"fcfs": Fcfs, "priority": Priority}
VOCAB = 6
Content = tuple[object, ...]
Window = int | tuple[str, int] | str | None
"""Everything (None), a sliding window, ("chunked", size), or "state"."""


def group_of(index: int, window: Window) -> CacheGroup:
    """Return a cache group that keeps what ``window`` says."""
    if window == "state":
        return CacheGroup(f"g{index}", (index,), (), retention=Retention.STATE)
    if isinstance(window, tuple):
        return CacheGroup(f"g{index}", (index,), (), window[1], Retention.CHUNKED)
    assert not isinstance(window, str)
    return CacheGroup(f"g{index}", (index,), (), window)


@dataclass(frozen=True, slots=True)
class Setup:
    """Sizes of an engine. ``spare`` blocks come on top of what one longest sequence needs; ``depth`` plans are
    outstanding when a step is accounted: 1 is the plain loop.
    """

    block_size: int = 4
    windows: tuple[Window, ...] = (None,)
    spare: int = 100
    max_num_seqs: int = 4
    budget: int = 64
    max_model_len: int = 48
    threshold: int = 0
    chunked: bool = True
    num_drafts: int = 0
    depth: int = 1
    policy: str = "fcfs"
    caching: bool = True

    def scheduler(self) -> Scheduler:
        """Return a scheduler of this size."""
        groups = [group_of(i, w) for i, w in enumerate(self.windows)]
        step_tokens = self.budget * self.depth
        blocks = sequence_blocks(groups, self.max_model_len, self.block_size, step_tokens) + self.spare + 1
        cache = KVCacheManager(
            groups, self.block_size, blocks, self.max_num_seqs, caching=self.caching, step_tokens=step_tokens
        )
        limits = SchedulerLimits(
            self.max_num_seqs, self.budget, self.max_model_len, self.threshold, self.chunked, self.num_drafts
        )
        return Scheduler(limits, cache, POLICIES[self.policy]())


def request(name: str, prompt: list[int], max_tokens: int = 5, **values: object) -> EngineCoreRequest:
    """Return a request; ``eos``, ``stop_token_ids``, ``min_tokens`` and ``logprobs`` are pulled out of ``values``."""
    known = {k: values.pop(k) for k in ("stop_token_ids", "min_tokens", "logprobs") if k in values}
    params = SamplingParams(max_tokens=None, **known)  # type: ignore[arg-type]
    eos = values.pop("eos", [])
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=params,
        eos_token_ids=eos,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        seed=0,
        **values,  # type: ignore[arg-type]
    )


def next_token(name: str, position: int, done: int, min_tokens: int, stops: set[int]) -> int:
    """Return the token that request ``name`` samples at ``position``, ``done`` output tokens being there."""
    token = zlib.crc32(f"{name}:{position}".encode()) % VOCAB
    while done < min_tokens and token in stops and len(stops) < VOCAB:
        token = (token + 1) % VOCAB
    return token


def stops_of(params: SamplingParams, eos: list[int]) -> set[int]:
    """Return all ids that end a request."""
    return {*eos, *(params.stop_token_ids or ())}


def expected(asked: EngineCoreRequest) -> tuple[list[int], FinishReason, int | None]:
    """Return tokens, finish and stop reason of a request that is left alone."""
    params = asked.sampling_params
    stops = stops_of(params, asked.eos_token_ids)
    start, out = len(asked.prompt_token_ids), list[int]()
    while True:
        token = next_token(asked.request_id, start + len(out), len(out), params.min_tokens, stops)
        out.append(token)
        if token in stops and len(out) > params.min_tokens:
            return out, FinishReason.STOP, None if token in asked.eos_token_ids else token
        if len(out) == asked.max_tokens:
            return out, FinishReason.LENGTH, None


@dataclass(slots=True)
class _Slot:
    new: NewSequence
    tokens: dict[int, int]
    tables: list[dict[int, int]]


@dataclass(slots=True)
class FakeRunner:
    """Executes plans in order, at once, like a device would later."""

    setup: Setup
    salts: dict[str, str]
    rng: random.Random
    slots: dict[int, _Slot] = field(default_factory=dict)
    cells: dict[tuple[int, int, int], Content] = field(default_factory=dict)
    """(group, page, offset) to the sequence up to the token that is kept there."""
    computed: Counter[str] = field(default_factory=Counter)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        self._change(plan)
        for row, slot in enumerate(plan.slots.tolist()):
            self._write(plan, row, slot)
        for row, slot in enumerate(plan.slots.tolist()):
            self._read(plan, row, slot)
        rows = [self._sample(plan, int(row)) for row in np.flatnonzero(plan.samples)]
        width = 1 + (self.setup.num_drafts if plan.drafts is not None else 0)
        tokens = np.full((len(rows), width), -1, dtype=np.int32)
        for at, sampled in enumerate(rows):
            tokens[at, : len(sampled)] = sampled
        sampled_slots = plan.slots[plan.samples].tolist()
        output = SamplerOutput(tokens, self._logprobs(sampled_slots, rows))
        return ModelRunnerOutput(plan.step_id, output, self._drafts(sampled_slots))

    def _change(self, plan: SchedulerOutput) -> None:
        for slot in plan.released:
            del self.slots[slot]
        for new in plan.new:
            assert new.slot not in self.slots, "a slot was given away before it was released"
            tables: list[dict[int, int]] = [{} for _ in self.setup.windows]
            self.slots[new.slot] = _Slot(new, dict(enumerate(new.token_ids.tolist())), tables)
        for group, (slots, places, blocks) in enumerate(plan.blocks):
            for slot, place, block in zip(slots.tolist(), places.tolist(), blocks.tolist(), strict=True):
                self.slots[slot].tables[group][place] = block

    def _content(self, slot: int, position: int) -> Content:
        held = self.slots[slot]
        return (self.salts[held.new.request_id], *(held.tokens[p] for p in range(position + 1)))

    def _write(self, plan: SchedulerOutput, row: int, slot: int) -> None:
        start, count = int(plan.starts[row]), int(plan.counts[row])
        drafts = int(plan.num_drafts[row]) if plan.num_drafts is not None else 0
        held = self.slots[slot]
        self.computed[held.new.request_id] += count
        for at in range(drafts):
            assert plan.drafts is not None and plan.drafts[row, at] >= 0
            held.tokens[start + count - drafts + at] = int(plan.drafts[row, at])
        for position in range(start, start + count):
            for group in self._paged():
                page = held.tables[group][position // self.setup.block_size]
                assert page > 0, "a token was written into nobody's block"
                self.cells[group, page, position % self.setup.block_size] = self._content(slot, position)

        self._mix(slot, start, start + count)

    def _paged(self) -> list[int]:
        return [group for group, window in enumerate(self.setup.windows) if window != "state"]

    def _mix(self, slot: int, start: int, end: int) -> None:
        """Read the states behind the first ``start`` tokens, and write those behind ``end``."""
        size = self.setup.block_size
        for group in set(range(len(self.setup.windows))) - set(self._paged()):
            table = self.slots[slot].tables[group]
            if start:
                kept = self.cells.get((group, table[(start - 1) // size], 0))
                assert kept == self._content(slot, start - 1), f"group {group} goes on from another state at {start}"
            page = table[(end - 1) // size]
            assert page > 0, "a state was written into nobody's page"
            self.cells[group, page, 0] = self._content(slot, end - 1)

    def _first_seen(self, window: Window, position: int) -> int:
        if isinstance(window, tuple):
            return position // window[1] * window[1]
        return max(0, position - window + 1) if isinstance(window, int) else 0

    def _read(self, plan: SchedulerOutput, row: int, slot: int) -> None:
        start, count = int(plan.starts[row]), int(plan.counts[row])
        tables = self.slots[slot].tables
        for group in self._paged():
            for position in range(self._first_seen(self.setup.windows[group], start), start + count):
                page = tables[group][position // self.setup.block_size]
                kept = self.cells.get((group, page, position % self.setup.block_size))
                assert kept == self._content(slot, position), f"group {group} reads something else at {position}"

    def _sample(self, plan: SchedulerOutput, row: int) -> list[int]:
        """Sample behind the last known token, and on behind each draft that is what was sampled in its place."""
        held = self.slots[int(plan.slots[row])]
        drafts = int(plan.num_drafts[row]) if plan.num_drafts is not None else 0
        known = int(plan.starts[row] + plan.counts[row]) - drafts
        out: list[int] = []
        for at in range(drafts + 1):
            out.append(self._next(held, known + at))
            if at < drafts and held.tokens[known + at] != out[-1]:
                break
        held.tokens.update((known + at, token) for at, token in enumerate(out))
        return out

    def _next(self, held: _Slot, position: int) -> int:
        params = held.new.params
        stops = set(held.new.eos_token_ids)
        return next_token(held.new.request_id, position, position - held.new.prompt_length, params.min_tokens, stops)

    def _logprobs(self, slots: list[int], rows: list[list[int]]) -> list[list[TokenLogprobs] | None] | None:
        asking = [self.slots[slot].new.params.logprobs is not None for slot in slots]
        if not any(asking):
            return None
        return [
            [TokenLogprobs([token], [-float(token)], 1) for token in row] if asks else None
            for row, asks in zip(rows, asking, strict=True)
        ]

    def _drafts(self, slots: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]] | None:
        """Propose anything: right tokens, wrong ones, none, and more than there is room for."""
        if not self.setup.num_drafts or self.rng.random() < 0.1:
            return None
        drafts = np.full((len(slots), self.setup.num_drafts), -1, dtype=np.int32)
        for at, slot in enumerate(slots):
            held = self.slots[slot]
            known = self._known(held)
            for place in range(self.rng.randint(0, self.setup.num_drafts)):
                right = self._next(held, known + place)
                drafts[at, place] = right if self.rng.random() < 0.7 else self.rng.randrange(VOCAB)
        return drafts

    @staticmethod
    def _known(held: _Slot) -> int:
        return max(held.tokens) + 1


@dataclass(slots=True)
class Arrival:
    """A request with the step before which it comes, and the one before which it is taken back (or None)."""

    request: EngineCoreRequest
    at: int = 0
    abort_at: int | None = None


@dataclass(slots=True)
class Told:
    """What was said about a request."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    cached: int = 0
    logprobs: list[TokenLogprobs] | None = None


class Engine:
    """The loop, with every invariant checked at every step."""

    def __init__(self, setup: Setup, arrivals: list[Arrival], seed: int = 0) -> None:
        self.setup = setup
        self.scheduler = setup.scheduler()
        self.rng = random.Random(seed)
        self.arrivals = arrivals
        self.runner = FakeRunner(setup, {a.request.request_id: a.request.cache_salt for a in arrivals}, self.rng)
        self.told: dict[str, Told] = {}
        self.flight: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self.admitted: list[str] = []
        self.steps = 0
        self.keys = {a.request.request_id: POLICIES[setup.policy]().key(request_view(a.request)) for a in arrivals}

    def run(self, limit: int = 4000) -> dict[str, Told]:
        """Run to the end; returns what was told."""
        while self.scheduler.has_work() or self._pending():
            assert self.steps < limit, "nothing moves any more"
            self._come_and_go()
            self.step()
        while self.flight:
            self._account()
        self.scheduler.check_idle()
        return self.told

    def _pending(self) -> bool:
        return any(a.at >= self.steps for a in self.arrivals)

    def _come_and_go(self) -> None:
        for arrival in self.arrivals:
            name = arrival.request.request_id
            if arrival.at == self.steps:
                self.told[name] = Told()
                self.scheduler.add(arrival.request)
            if arrival.abort_at == self.steps and name in self.told:
                alive = self.told[name].finish is None
                assert self.scheduler.abort(name) == alive
                assert self.scheduler.abort(name) is False

    def step(self) -> None:
        """Schedule, execute, and account for the oldest plan once ``depth`` are outstanding."""
        plan = self.scheduler.schedule()
        self._check_plan(plan)
        self.flight.append((plan, self.runner.execute(plan)))
        self.steps += 1
        if len(self.flight) >= self.setup.depth:
            self._account()
        self._check_blocks()

    def _account(self) -> None:
        for event in self.scheduler.update(*self.flight.pop(0)).events:
            self._tell(event)

    def _check_plan(self, plan: SchedulerOutput) -> None:
        counts, setup = plan.counts, self.setup
        assert plan.num_tokens <= setup.budget
        assert (counts > 0).all()
        assert len(set(plan.slots.tolist())) == len(plan.slots)
        assert counts.tolist() == sorted(counts.tolist(), key=lambda c: c != 1), "single tokens come first"
        if setup.threshold:
            assert (counts <= setup.threshold).all()
        names = [new.request_id for new in plan.new]
        self.admitted += names
        waiting = list(self.scheduler._waiting.keys())
        if names and waiting:
            assert max(self.keys[name] for name in names) <= min(waiting), "somebody was overtaken"

    def _check_blocks(self) -> None:
        """Every reference of the pool is an entry of a table, and the other way round."""
        cache = self.scheduler.cache
        cache.pool.check()
        entries: Counter[int] = Counter()
        for slot in range(self.setup.max_num_seqs):
            for group in range(len(self.setup.windows)):
                entries.update(block for block in cache.table(slot, group) if block)
        held = {block: count for block, count in enumerate(cache.pool._references) if count}
        assert held == dict(entries)

    def _tell(self, event: CoreEvent) -> None:
        told = self.told[event.request_id]
        assert told.finish is None, "a request that is over got another event"
        told.tokens += event.token_ids
        told.finish, told.stop_reason = event.finish, event.stop_reason
        if event.finish is not None:
            told.cached = event.cached_tokens
        if event.logprobs is not None:
            told.logprobs = [*(told.logprobs or []), *event.logprobs]


def check(setup: Setup, arrivals: list[Arrival], seed: int = 0) -> Engine:
    """Run a workload, and compare what every request was told with what it should get."""
    engine = Engine(setup, arrivals, seed)
    told = engine.run()
    assert set(told) == {a.request.request_id for a in arrivals}
    for arrival in arrivals:
        got = told[arrival.request.request_id]
        tokens, finish, reason = expected(arrival.request)
        if got.finish is FinishReason.ABORT:
            assert arrival.abort_at is not None
            assert got.tokens == tokens[: len(got.tokens)]
        else:
            assert (got.tokens, got.finish, got.stop_reason) == (tokens, finish, reason)
    return engine


def names_by_key(engine: Engine) -> Iterator[str]:
    """Yield requests in the order of their keys."""
    yield from sorted(engine.keys, key=lambda name: engine.keys[name])
