"""Single rules of the scheduler."""

from __future__ import annotations

import time

import numpy as np
import pytest
from scheduler_world import VOCAB, Arrival, Engine, Setup, check, expected, next_token, request

from jackfield.protocol import CoreEvent, FinishReason, SamplerOutput
from jackfield.protocol.steps import ModelRunnerOutput
from jackfield.scheduler.order import request_view
from jackfield_scheduling.policies import Fcfs, Priority


def test_a_prompt_is_cut_where_the_budget_ends() -> None:
    engine = Engine(Setup(budget=8), [Arrival(request("a", list(range(5)) * 4, 1))])
    counts = []
    engine._come_and_go()
    while engine.scheduler.has_work():
        engine.step()
        counts.append(engine.runner.computed["a"])
    assert counts == [8, 16, 20]


def test_decode_goes_on_beside_a_long_prompt() -> None:
    arrivals = [Arrival(request("a", [1], 12, arrival=0)), Arrival(request("b", [2] * 30, 1, arrival=1), at=1)]
    engine = Engine(Setup(budget=6), arrivals)
    engine._come_and_go()
    engine.step()
    for step in range(1, 6):
        engine._come_and_go()
        engine.step()
        assert len(engine.told["a"].tokens) == step + 1
        assert engine.runner.computed["b"] == 5 * step


def test_a_threshold_keeps_one_prompt_from_filling_a_step() -> None:
    arrivals = [Arrival(request(name, [1] * 12, 1, arrival=i)) for i, name in enumerate("ab")]
    engine = Engine(Setup(budget=20, threshold=5, caching=False), arrivals)
    engine._come_and_go()
    engine.step()
    assert dict(engine.runner.computed) == {"a": 5, "b": 5}


def test_prompts_stay_whole_where_chunks_are_off() -> None:
    arrivals = [Arrival(request(name, [1] * 12, 1, arrival=i)) for i, name in enumerate("ab")]
    engine = Engine(Setup(budget=20, chunked=False, caching=False), arrivals)
    engine._come_and_go()
    engine.step()
    assert dict(engine.runner.computed) == {"a": 12}
    engine.step()
    assert dict(engine.runner.computed) == {"a": 12, "b": 12}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_is_computed_once(depth: int) -> None:
    prompt = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]
    arrivals = [Arrival(request("a", prompt, 3, arrival=0)), Arrival(request("b", prompt, 3, arrival=1), at=6)]
    engine = check(Setup(depth=depth), arrivals)
    assert (engine.told["a"].cached, engine.told["b"].cached) == (0, 8)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_of_one_step_leaves_its_prefix_too(depth: int) -> None:
    prompt = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]
    arrivals = [Arrival(request("a", prompt, 1, arrival=0)), Arrival(request("b", prompt, 1, arrival=1), at=4)]
    engine = check(Setup(depth=depth), arrivals)
    assert engine.told["b"].cached == 8


@pytest.mark.parametrize("other", [{"cache_salt": "x"}, {"adapter": "x"}])
def test_salts_and_adapters_share_no_prefix(other: dict[str, str]) -> None:
    prompt = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]
    arrivals = [Arrival(request("a", prompt, 3)), Arrival(request("b", prompt, 3, arrival=1, **other), at=6)]
    assert check(Setup(), arrivals).told["b"].cached == 0


def test_windows_free_blocks_while_a_sequence_runs() -> None:
    engine = Engine(Setup(windows=(6,), block_size=2), [Arrival(request("a", [1] * 20, 20))])
    engine._come_and_go()
    for _ in range(12):
        engine.step()
    pool = engine.scheduler.cache.pool
    assert pool.num_usable - pool.num_free <= 5, "32 tokens would be 16 blocks; a window of 6 touches at most 4"


def first_position(name: str, token: int, start: int) -> int:
    """Return the first position from ``start`` at which a request samples ``token``."""
    return next(p for p in range(start, 1000) if next_token(name, p, 0, 0, set()) == token)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("drafts", [0, 3])
def test_every_way_to_end(depth: int, drafts: int) -> None:
    stop = next_token("stop", 5, 0, 0, set())
    arrivals = [
        Arrival(request("length", [1, 2], 7, arrival=0)),
        Arrival(request("eos", [1, 2], 40, eos=list(range(VOCAB)), arrival=1)),
        Arrival(request("stop", [1, 2], 40, stop_token_ids=[stop], arrival=2)),
        Arrival(request("both", [1, 2], 1, eos=list(range(VOCAB)), arrival=3)),
        Arrival(request("at least", [1, 2], 40, eos=list(range(VOCAB - 1)), min_tokens=9, arrival=4)),
    ]
    told = check(Setup(depth=depth, num_drafts=drafts), arrivals).told
    assert len(told["length"].tokens) == 7 and told["length"].finish is FinishReason.LENGTH
    assert len(told["eos"].tokens) == 1 and told["eos"].finish is FinishReason.STOP
    assert told["eos"].stop_reason is None, "the model's own end has no stop reason"
    assert told["stop"].stop_reason == stop == told["stop"].tokens[-1]
    assert len(told["stop"].tokens) == first_position("stop", stop, 2) - 1
    assert told["both"].finish is FinishReason.STOP, "a stop goes before the length"
    assert len(told["at least"].tokens) > 9 and told["at least"].tokens[:9] == [VOCAB - 1] * 9


@pytest.mark.parametrize("drafts", [0, 2])
def test_log_probabilities_go_with_their_tokens(drafts: int) -> None:
    arrivals = [
        Arrival(request("a", [1, 2], 9, logprobs=1, arrival=0)),
        Arrival(request("b", [1, 2], 9, arrival=1)),
        Arrival(request("c", [1, 2], 9, logprobs=0, eos=[0], arrival=2)),
    ]
    told = check(Setup(num_drafts=drafts), arrivals, seed=3).told
    assert told["b"].logprobs is None
    for name in "ac":
        scored = told[name].logprobs
        assert scored is not None
        assert [entry.token_ids[0] for entry in scored] == told[name].tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_make_it_faster_and_change_nothing(depth: int) -> None:
    arrivals = [Arrival(request(f"r{i}", [1, 2, 3], 30, arrival=i)) for i in range(3)]
    plain = check(Setup(depth=depth), arrivals)
    drafted = check(Setup(depth=depth, num_drafts=4), arrivals, seed=1)
    if depth == 1:
        assert drafted.steps < plain.steps
    assert {n: t.tokens for n, t in drafted.told.items()} == {n: t.tokens for n, t in plain.told.items()}


@pytest.mark.parametrize("when", ["waiting", "planned", "running"])
def test_aborting(when: str) -> None:
    engine = Engine(
        Setup(max_num_seqs=1), [Arrival(request("a", [1] * 9, 9)), Arrival(request("b", [2], 3, arrival=1))]
    )
    engine._come_and_go()
    if when == "waiting":
        assert engine.scheduler.abort("a")
    plan = engine.scheduler.schedule()
    result = engine.runner.execute(plan)
    if when == "planned":
        assert engine.scheduler.abort("a")
        assert engine.scheduler.num_running == 0
    event = engine.scheduler.update(plan, result).events[0]
    if when == "running":
        assert (event.request_id, event.finish) == ("a", None)
        assert engine.scheduler.abort("a")
    else:
        assert (event.request_id, event.token_ids, event.finish) == ("a", [], FinishReason.ABORT)
    assert engine.scheduler.abort("a") is False
    assert engine.scheduler.abort("nobody") is False
    told = [e for _ in range(6) for e in step(engine)]
    rest = expected(engine.arrivals[1].request)[0]
    # Where "a" never ran, the first step was already one of "b".
    assert [t for e in told if e.request_id == "b" for t in e.token_ids] == rest[when == "waiting" :]
    engine.scheduler.check_idle()


def step(engine: Engine) -> list[CoreEvent]:
    plan = engine.scheduler.schedule()
    return list(engine.scheduler.update(plan, engine.runner.execute(plan)).events)


def test_a_living_request_is_not_idle() -> None:
    engine = Engine(Setup(), [Arrival(request("a", [1], 3))])
    engine._come_and_go()
    with pytest.raises(AssertionError, match="requests are left"):
        engine.scheduler.check_idle()


def test_steps_are_accounted_in_order() -> None:
    scheduler = Setup().scheduler()
    scheduler.add(request("a", [1], 3))
    scheduler.schedule()
    second = scheduler.schedule()
    assert scheduler.steps_in_flight == 2
    with pytest.raises(AssertionError, match="steps are accounted in order"):
        scheduler.update(second, ModelRunnerOutput(second.step_id, SamplerOutput(np.empty((0, 1), np.int32))))


def test_policies_order_by_their_keys() -> None:
    early, urgent = request("a", [1], arrival=1, priority=5), request("b", [1], arrival=2, priority=-5)
    assert sorted([urgent, early], key=lambda r: Fcfs().key(request_view(r))) == [early, urgent]
    assert sorted([early, urgent], key=lambda r: Priority().key(request_view(r))) == [urgent, early]


def test_urgent_requests_are_admitted_first() -> None:
    arrivals = [
        Arrival(request("running", [1], 3, arrival=0)),
        Arrival(request("slow", [1], 3, arrival=1, priority=9), at=1),
        Arrival(request("urgent", [1], 3, arrival=2, priority=-9), at=1),
    ]
    engine = check(Setup(max_num_seqs=1, policy="priority"), arrivals)
    assert engine.admitted == ["running", "urgent", "slow"]


def test_many_waiting_requests_cost_nothing_per_step() -> None:
    """A step looks at the front of the queue only: 10,000 waiting may not cost much more than 100."""

    def seconds(waiting: int) -> float:
        scheduler = Setup(max_num_seqs=1, caching=False).scheduler()
        for i in range(waiting + 1):
            scheduler.add(request(f"r{i}", [1], 40, arrival=i))
        best = 1e9
        for _ in range(30):
            started = time.perf_counter()
            plan = scheduler.schedule()
            best = min(best, time.perf_counter() - started)
            scheduler.update(plan, ModelRunnerOutput(plan.step_id, SamplerOutput(np.ones((1, 1), dtype=np.int32))))
        return best

    assert seconds(10_000) < 5 * seconds(100) + 1e-4
