"""Pause and resume, and the limit on waiting requests, offline."""

from __future__ import annotations

import pytest
from engine_world import drain, greedy, ids_of, prompt, start

from jackfield.errors import RequestError

PROMPTS = [prompt(seed, 10 + 3 * seed) for seed in range(6)]


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_pause_changes_no_token(model: str, overlapped: bool, steps: int) -> None:
    expected = ids_of(start(model), PROMPTS, greedy(12))
    llm = start(model, max_num_seqs=4, async_scheduling=overlapped)
    names = [llm.enqueue(p, greedy(12)) for p in PROMPTS[:5]]
    for _ in range(steps):
        llm._advance()
    llm.pause()
    scheduler = llm._core.scheduler
    assert not llm._core.has_work()
    assert scheduler._last_work <= scheduler._retired, "a step with work is in flight"
    held = (scheduler.num_running, scheduler.num_waiting, scheduler.cache.pool.num_free)
    assert held[0] == (4 if steps else 0)
    assert held[0] + held[1] == 5
    names.append(llm.enqueue(PROMPTS[5], greedy(12)))
    llm.pause()
    assert (scheduler.num_running, scheduler.num_waiting) == (held[0], held[1] + 1)
    assert scheduler.cache.pool.num_free == held[2]
    llm.resume()
    outputs = llm.wait_for_completion()
    assert [output.request_id for output in outputs] == names
    assert [output.outputs[0].token_ids for output in outputs] == expected
    drain(llm)


def test_what_would_run_requests_is_refused_while_paused(model: str) -> None:
    llm = start(model)
    name = llm.enqueue(PROMPTS[0], greedy(3))
    llm.pause()
    for call in (
        lambda: llm.generate(PROMPTS, greedy(3)),
        lambda: llm.wait_for_completion(),
        lambda: next(llm.stream(PROMPTS[0], greedy(3))),
        lambda: llm._advance(),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert (caught.value.message, caught.value.remedy) == ("the engine is paused", "call resume() first")
    assert llm._outputs.num_requests() == 1
    llm.resume()
    assert [output.request_id for output in llm.wait_for_completion()] == [name]
    drain(llm)


@pytest.mark.parametrize("overlapped", [False, True])
def test_requests_can_be_ended_while_paused(model: str, overlapped: bool) -> None:
    llm = start(model, max_num_seqs=2, async_scheduling=overlapped)
    names = [llm.enqueue(p, greedy(50)) for p in PROMPTS[:3]]
    for _ in range(3):
        llm._advance()
    llm.pause()
    for name in (*names, *names, "unknown"):
        llm.abort(name)
    while llm._core.has_work():
        llm._advance()
    assert llm._core.scheduler.num_running == llm._core.scheduler.num_waiting == 0
    llm._core.scheduler.check_idle()
    assert [output.outputs[0].finish_reason for output in (llm._done[name] for name in names)] == ["abort"] * 3


def test_enqueue_honours_max_waiting(model: str) -> None:
    llm = start(model, max_num_seqs=2, max_waiting=3)
    names = [llm.enqueue(PROMPTS[0], greedy(2)) for _ in range(5)]
    with pytest.raises(RequestError) as caught:
        llm.enqueue(PROMPTS[0], greedy(2))
    assert caught.value.message == "too many requests are waiting"
    assert (caught.value.field, caught.value.value) == ("scheduler.max_waiting", 3)
    assert [output.request_id for output in llm.wait_for_completion()] == names
    llm.enqueue(PROMPTS[0], greedy(2))
    llm.wait_for_completion()
    assert len(ids_of(llm, PROMPTS, greedy(2))) == 6, "generate takes what it is given"
