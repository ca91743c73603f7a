"""Metrics: totals that only grow, compared with what the outputs say."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
from engine_world import drain, greedy, ids_of, prompt, start

from jackfield.metrics import EngineMetrics, MetricsCollector
from jackfield.metrics.collector import FinishedRequest
from jackfield.protocol import CoreEvent, EngineCoreOutput

NO_TOTALS = ("running", "waiting", "free_blocks", "cache_usage", "histograms")


def totals(metrics: EngineMetrics) -> dict[str, Any]:
    values = {f.name: getattr(metrics, f.name) for f in dataclasses.fields(metrics) if f.name not in NO_TOTALS}
    return {**{f"finished {reason}": n for reason, n in values.pop("finished").items()}, **values}


@pytest.mark.parametrize("overlapped", [False, True])
def test_counters_are_what_the_outputs_say(model: str, overlapped: bool) -> None:
    llm = start(model, async_scheduling=overlapped)
    usable = llm._core.scheduler.cache.pool.num_usable
    assert llm.get_metrics() == EngineMetrics(free_blocks=usable)
    prompts = [prompt(1, 24), prompt(2, 9), prompt(3, 30)]
    first = llm.generate(prompts, greedy(7))
    again = llm.generate(prompts[:1], greedy(5, stop_token_ids=[first[0].outputs[0].token_ids[0]]))
    metrics = llm.get_metrics()
    assert metrics.finished == {"length": 3, "stop": 1}
    assert metrics.prompt_tokens == metrics.prefix_queries == 24 + 9 + 30 + 24
    assert again[0].num_cached_tokens == 20
    assert metrics.cached_prompt_tokens == metrics.prefix_hits == 20
    assert metrics.prefix_hit_rate == pytest.approx(20 / 87)
    assert metrics.generation_tokens == 3 * 7 + 1
    assert (metrics.preemptions, metrics.drafts_proposed, metrics.draft_acceptance_rate) == (0, 0, 0.0)
    times = [output.metrics for output in (*first, *again)]
    assert metrics.first_tokens == 4
    assert metrics.first_token_seconds == pytest.approx(sum((t.first_token or 0) - t.arrival for t in times))
    assert metrics.end_to_end_seconds == pytest.approx(sum((t.last_token or 0) - t.arrival for t in times))
    drain(llm)
    assert (llm.get_metrics().running, llm.get_metrics().waiting) == (0, 0)
    assert llm.get_metrics().free_blocks == usable


def test_totals_only_grow_and_gauges_tell_the_moment(model: str) -> None:
    llm = start(model, max_num_seqs=2, num_blocks=40, enable_prefix_caching=False)
    for seed in range(5):
        llm.enqueue(prompt(seed, 40), greedy(40))
    assert (llm.get_metrics().running, llm.get_metrics().waiting) == (0, 5)
    before = totals(llm.get_metrics())
    largest = 0
    while llm._core.has_work():
        llm._advance()
        metrics = llm.get_metrics()
        after = totals(metrics)
        assert all(after[name] >= value for name, value in before.items())
        assert metrics.running <= 2
        largest, before = max(largest, metrics.running), after
    assert largest == 2
    assert before["preemptions"] > 0
    assert before["generation_tokens"] == 200
    assert (before["prefix_queries"], before["prefix_hits"]) == (0, 0)


def test_drafts_are_counted(model: str) -> None:
    llm = start(model, speculative={"method": "ngram", "num_speculative_tokens": 3, "adaptive": False})
    params = greedy(30, allowed_token_ids=[5], logprobs=0)
    outputs = llm.generate([[5] * 12], params)
    metrics = llm.get_metrics()
    assert outputs[0].outputs[0].token_ids == [5] * 30
    assert 0 < metrics.drafts_accepted <= metrics.drafts_proposed
    assert metrics.draft_acceptance_rate == 1.0


def test_aborted_requests_count_under_their_reason(model: str) -> None:
    llm = start(model)
    name = llm.enqueue(prompt(1, 10), greedy(90))
    llm._advance()
    llm.abort(name)
    llm.wait_for_completion()
    metrics = llm.get_metrics()
    assert metrics.finished == {"abort": 1}
    assert (metrics.prompt_tokens, metrics.generation_tokens, metrics.first_tokens) == (10, 1, 1)


def test_an_error_in_metrics_stops_no_request(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = ids_of(start(model), [prompt(1, 10)], greedy(6))

    def fail(self: MetricsCollector, output: EngineCoreOutput) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(MetricsCollector, "_count_step", fail)
    llm = start(model)
    with caplog.at_level(logging.ERROR, logger="jackfield.metrics"):
        assert ids_of(llm, [prompt(1, 10)], greedy(6)) == expected
    assert [record.getMessage() for record in caplog.records] == ["metrics failed and are not counted any more"]
    assert llm.get_metrics().finished == {}


def test_a_request_without_tokens_has_no_times() -> None:
    collector = MetricsCollector(9)
    collector.finish(FinishedRequest("abort", 4, 0, 1.0, None, None))
    collector.step(EngineCoreOutput([CoreEvent("a", [1, 2])]))
    metrics = collector.snapshot()
    assert (metrics.finished, metrics.first_tokens, metrics.first_token_seconds) == ({"abort": 1}, 0, 0.0)
    assert (metrics.generation_tokens, metrics.free_blocks) == (2, 9)
