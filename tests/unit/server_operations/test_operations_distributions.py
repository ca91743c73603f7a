"""Histograms, and what they are filled with."""

from __future__ import annotations

import pytest

from jackfield.metrics import Histogram
from jackfield.metrics.distributions import BOUNDS, Distributions, FinishedRequest
from jackfield.protocol import CoreEvent, EngineCoreOutput, FinishReason


def test_a_value_counts_under_every_bound_that_it_does_not_exceed() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 5.0, 9.0):
        histogram.observe(value)
    data = histogram.data()
    assert (data.cumulative, data.total, data.count) == ((2, 3, 4, 5), 17.0, 5)


def test_bounds_rise() -> None:
    assert all(list(bounds) == sorted(set(bounds)) for bounds in BOUNDS.values())


def counts(distributions: Distributions) -> dict[str, tuple[int, float]]:
    return {name: (data.count, data.total) for name, data in distributions.data().items() if data.count}


def test_times_between_outputs_are_of_each_sequence() -> None:
    distributions = Distributions()
    steps = [
        (1.0, [CoreEvent("a", [1])]),
        (1.5, [CoreEvent("a", [2]), CoreEvent("b", [1])]),
        (3.5, [CoreEvent("a", [3, 4], FinishReason.STOP), CoreEvent("b", [2], FinishReason.LENGTH)]),
    ]
    for now, events in steps:
        distributions.step(EngineCoreOutput(events), now)
    assert counts(distributions) == {
        "inter_token_latency_seconds": (3, pytest.approx(0.5 + 2.0 + 2.0)),
        "request_time_per_output_token_seconds": (2, pytest.approx(2.5 / 3 + 2.0)),
        "request_generation_tokens": (2, 6),
    }


def test_a_sequence_that_ends_without_a_token_counts_none() -> None:
    distributions = Distributions()
    distributions.step(EngineCoreOutput([CoreEvent("a", [], FinishReason.ABORT)]), 1.0)
    assert counts(distributions) == {"request_generation_tokens": (1, 0)}


def test_nothing_is_kept_of_sequences_that_are_over() -> None:
    distributions = Distributions()
    for number in range(100):
        name = f"r{number}"
        distributions.step(EngineCoreOutput([CoreEvent(name, [1])]), 1.0)
        distributions.step(EngineCoreOutput([CoreEvent(name, [], FinishReason.ABORT)]), 2.0)
    assert distributions._sequences == {}


def test_parts_of_a_request_add_up() -> None:
    distributions = Distributions()
    distributions.finish(FinishedRequest("stop", 7, 0, 10.0, 12.5, 14.0, scheduled=11.0))
    assert counts(distributions) == {
        "time_to_first_token_seconds": (1, 2.5),
        "e2e_request_latency_seconds": (1, 4.0),
        "request_queue_time_seconds": (1, 1.0),
        "request_prefill_time_seconds": (1, 1.5),
        "request_decode_time_seconds": (1, 1.5),
        "request_prompt_tokens": (1, 7),
    }


def test_what_is_not_known_is_not_counted() -> None:
    distributions = Distributions()
    distributions.finish(FinishedRequest("abort", 7, 0, 10.0, None, None))
    assert counts(distributions) == {"request_prompt_tokens": (1, 7)}
