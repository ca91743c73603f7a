"""Statistics of times, under the names that tools around such benchmarks read (``mean_ttft_ms``, ``p99_tpot_ms``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jackfield.errors import ConfigError

PERCENTILES = (90.0, 95.0, 99.0)
METRICS: Mapping[str, str] = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
"""Short names of what is measured of a request, and long ones."""


def summary(name: str, seconds: Sequence[float], percentiles: Iterable[float] = PERCENTILES) -> dict[str, float | None]:
    """Return mean, median, standard deviation (of the population) and percentiles (linear between neighbours), in
    milliseconds and under names that hold ``name``; all None when nothing was measured.

    >>> summary("ttft", [0.1, 0.3], [90])
    {'mean_ttft_ms': 200.0, 'median_ttft_ms': 200.0, 'std_ttft_ms': 100.0, 'p90_ttft_ms': 280.0}
    """
    times = np.asarray(seconds, dtype=np.float64) * 1000
    percentiles = list(percentiles)
    kinds = ["mean", "median", "std", *(f"p{percent:g}" for percent in percentiles)]
    values: list[float | None] = [None] * len(kinds)
    if times.size:
        found = (np.mean(times), np.median(times), np.std(times), *np.percentile(times, percentiles))
        values = [round(float(value), 4) for value in found]
    return {f"{kind}_{name}_ms": value for kind, value in zip(kinds, values, strict=True)}


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Return percentiles from ``50,90,99.9``.

    Raises:
        ConfigError: one is no number from 0 to 100.
    """
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if not 0 <= _number(word) <= 100]
    if wrong:
        raise ConfigError(
            "percentiles are numbers from 0 to 100",
            field="--percentiles",
            value=", ".join(wrong),
            remedy="write them as 90,95,99",
        )
    return tuple(dict.fromkeys(float(word) for word in words))


@dataclass(frozen=True, slots=True)
class Goal:
    """A request is good when ``metric`` is at most ``limit_s`` seconds."""

    metric: str
    limit_s: float


def parse_goals(words: Sequence[str]) -> tuple[Goal, ...]:
    """Return goals from ``ttft:200`` and the like: a metric and milliseconds.

    Raises:
        ConfigError: some of the words are no goals, or two name the same metric.
    """
    metrics = [name for name in METRICS if name != "itl"]
    split = [(name, _number(value)) for name, _, value in (word.partition(":") for word in words)]
    names = [name for name, _ in split]
    wrong = [
        word
        for word, (name, value) in zip(words, split, strict=True)
        if name not in metrics or not 0 < value < float("inf") or names.count(name) > 1
    ]
    if wrong:
        raise ConfigError(
            "a goal is a metric, a colon and milliseconds, and each metric has one goal",
            field="--goodput",
            value=" ".join(wrong),
            remedy=f"write --goodput ttft:200 tpot:50; metrics are {', '.join(metrics)}",
        )
    return tuple(Goal(name, value / 1000) for name, value in split)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
