"""Statistics against Python's own, arrival times against their distribution, and what flags say."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from jackfield.benchmarking.arrivals import arrival_times
from jackfield.benchmarking.statistics import Goal, parse_goals, parse_percentiles, summary
from jackfield.errors import ConfigError


def test_a_summary_agrees_with_the_standard_library() -> None:
    seconds = [0.013, 0.2, 0.05, 0.4, 0.41, 0.007, 0.111, 0.9, 0.3, 0.02, 0.6]
    found = summary("ttft", seconds, (50, 90, 99))
    hundredths = statistics.quantiles(seconds, n=100, method="inclusive")
    expected = {
        "mean_ttft_ms": statistics.fmean(seconds),
        "median_ttft_ms": statistics.median(seconds),
        "std_ttft_ms": statistics.pstdev(seconds),
        "p50_ttft_ms": statistics.median(seconds),
        "p90_ttft_ms": hundredths[89],
        "p99_ttft_ms": hundredths[98],
    }
    assert found == {name: pytest.approx(value * 1000, abs=1e-4) for name, value in expected.items()}
    assert list(found) == list(expected)


def test_a_summary_of_nothing_has_no_figures() -> None:
    assert summary("itl", [], (99.9,)) == dict.fromkeys(
        ("mean_itl_ms", "median_itl_ms", "std_itl_ms", "p99.9_itl_ms"), None
    )


def test_poisson_arrivals_have_exponential_gaps() -> None:
    rate, count = 20.0, 20001
    times = arrival_times(count, rate, 1.0, seed=5)
    assert times[0] == 0.0 and len(times) == count
    gaps = np.sort(np.diff(times))
    # Largest distance from 1 - exp(-rate · t); above 1.63 / √n it would be none at the 1 % level (Kolmogorov).
    empirical = np.arange(1, len(gaps) + 1) / len(gaps)
    assert np.max(np.abs(empirical - (1 - np.exp(-rate * gaps)))) < 1.63 / math.sqrt(len(gaps))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_sets_the_variance_and_leaves_the_rate(burstiness: float) -> None:
    gaps = np.diff(arrival_times(40001, 10.0, burstiness, seed=1))
    assert gaps.mean() == pytest.approx(0.1, rel=0.03)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.1)


def test_arrivals_repeat_with_their_seed() -> None:
    assert arrival_times(50, 3.0, 1.0, seed=7) == arrival_times(50, 3.0, 1.0, seed=7)
    assert arrival_times(50, 3.0, 1.0, seed=7) != arrival_times(50, 3.0, 1.0, seed=8)
    assert arrival_times(3, math.inf, 1.0, seed=0) == [0.0, 0.0, 0.0]
    assert arrival_times(0, 5.0, 1.0, seed=0) == []


@pytest.mark.parametrize(
    ("rate", "burstiness", "flag"),
    [(0.0, 1.0, "--request-rate"), (math.nan, 1.0, "--request-rate"), (1.0, -1.0, "--burstiness")],
)
def test_rates_that_are_none_are_refused(rate: float, burstiness: float, flag: str) -> None:
    with pytest.raises(ConfigError, match="must be more than 0") as caught:
        arrival_times(1, rate, burstiness, 0)
    assert caught.value.field == flag


def test_percentiles_are_read() -> None:
    assert parse_percentiles("50, 99.9,50") == (50.0, 99.9)
    with pytest.raises(ConfigError) as caught:
        parse_percentiles("90,101,x")
    assert (caught.value.field, caught.value.value) == ("--percentiles", "101, x")


def test_goals_are_read_in_milliseconds() -> None:
    assert parse_goals(("ttft:200", "e2el:1500.5")) == (Goal("ttft", 0.2), Goal("e2el", 1.5005))


@pytest.mark.parametrize(
    "words", [["itl:3"], ["ttft"], ["ttft:x"], ["tpot:0"], ["tpot:inf"], ["ttft:1", "ttft:2"], ["time:5"]]
)
def test_goals_that_are_none_are_named(words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_goals(["e2el:9", *words])
    assert (caught.value.field, caught.value.value) == ("--goodput", " ".join(words))
