"""The numbers of several API processes add up."""

from __future__ import annotations

from pathlib import Path

from jackfield.metrics import EngineMetrics, HistogramData
from jackfield.metrics.distributions import empty
from jackfield.server.operations.exchange import Exchange, Numbers

BOUNDS = (1.0, 2.0)


def numbers(time: float, *, running: int, tokens: int, finished: dict[str, int], steps: int) -> Numbers:
    histograms = empty()
    first = histograms["time_to_first_token_seconds"]
    buckets = len(first.cumulative)
    histograms["time_to_first_token_seconds"] = HistogramData(first.bounds, (tokens,) * buckets, 0.5 * tokens)
    per_step = histograms["iteration_tokens_total"]
    histograms["iteration_tokens_total"] = HistogramData(per_step.bounds, (steps,) * len(per_step.cumulative), 9.0)
    engine = EngineMetrics(
        finished=finished, generation_tokens=tokens, running=running, preemptions=4, histograms=histograms
    )
    return Numbers(
        engine,
        {"request_params_n": HistogramData(BOUNDS, (1, 2, 3), 7.0)},
        [("POST", "/v1/completions", "200", tokens), ("GET", "/health", "200", 1)],
        [("GET", "/health", HistogramData(BOUNDS, (1, 1, 1), 0.25))],
        time,
    )


def test_what_processes_counted_is_added_and_what_the_engine_says_is_taken_once(tmp_path: Path) -> None:
    first, second = Exchange(tmp_path, 0), Exchange(tmp_path, 1)
    first.write(numbers(2.0, running=5, tokens=10, finished={"stop": 1}, steps=8))
    second.write(numbers(1.0, running=3, tokens=4, finished={"stop": 2, "length": 1}, steps=7))
    found = second.total()
    assert found == first.total()
    engine = found.engine
    assert (engine.generation_tokens, engine.finished) == (14, {"stop": 3, "length": 1})
    assert (engine.running, engine.preemptions) == (5, 4), "the later of the two, once"
    ttft = engine.histograms["time_to_first_token_seconds"]
    assert (ttft.count, ttft.total) == (14, 7.0)
    assert engine.histograms["iteration_tokens_total"].count == 8
    assert found.params["request_params_n"] == HistogramData(BOUNDS, (2, 4, 6), 14.0)
    assert sorted(found.calls) == [("GET", "/health", "200", 2), ("POST", "/v1/completions", "200", 14)]
    assert found.seconds == [("GET", "/health", HistogramData(BOUNDS, (2, 2, 2), 0.5))]


def test_a_process_that_writes_again_counts_once(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path, 0)
    for tokens in (1, 2, 3):
        exchange.write(numbers(float(tokens), running=0, tokens=tokens, finished={}, steps=1))
    assert exchange.total().engine.generation_tokens == 3
