"""From measurements to figures. The names are those that tools around serving benchmarks read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jackfield.benchmarking.load import Outcome
from jackfield.benchmarking.measure import Measurement
from jackfield.benchmarking.statistics import METRICS, PERCENTILES, Goal, summary

MOST_ERRORS = 10


def serve_report(
    outcome: Outcome, goals: Sequence[Goal] = (), percentiles: Iterable[float] = PERCENTILES
) -> dict[str, Any]:
    """Return the figures of a run.

    Latencies and tokens are of requests that succeeded. ``unfinished`` counts requests that an interruption ended, and
    ``unsent`` those that it kept from being sent. ``send_delay`` is how much later than due requests were sent.
    """
    good = [seen for seen in outcome.measurements if seen.succeeded]
    failed = [seen for seen in outcome.measurements if seen.error]
    percentiles = list(percentiles)
    report: dict[str, Any] = {
        "duration": round(outcome.duration_s, 4),
        "completed": len(good),
        "failed": len(failed),
        "unfinished": len(outcome.measurements) - len(good) - len(failed),
        "unsent": outcome.planned - len(outcome.measurements),
        **_rates(good, outcome.duration_s),
    }
    if goals:
        reached = sum(meets(seen, goals) for seen in good)
        report["good_completed"] = reached
        report["request_goodput"] = _per_second(reached, outcome.duration_s)
    for name, values in _times(good).items():
        report |= summary(name, values, percentiles)
    report |= summary("send_delay", [seen.sent - seen.due for seen in outcome.measurements], percentiles)
    return {**report, **_errors(failed)}


def meets(seen: Measurement, goals: Iterable[Goal]) -> bool:
    """Return whether a request that succeeded reaches all goals. An answer of one token reaches every tpot."""
    return all((getattr(seen, goal.metric) or 0.0) <= goal.limit_s for goal in goals)


def details(outcome: Outcome) -> list[dict[str, Any]]:
    """Return one entry for each request that was sent. Times are seconds."""
    return [
        {
            "sent": seen.sent,
            "ttft": seen.ttft,
            "tpot": seen.tpot,
            "e2el": seen.e2el,
            "itls": seen.gaps,
            "input_tokens": seen.input_tokens,
            "output_tokens": seen.output_tokens,
            "error": seen.error or (None if seen.succeeded else "unfinished"),
        }
        for seen in outcome.measurements
    ]


def table_rows(report: dict[str, Any], percentiles: Iterable[float]) -> list[list[str]]:
    """Return a row for each kind of latency, in milliseconds: its name, mean, median, std and percentiles."""
    kinds = ["mean", "median", "std", *(f"p{percent:g}" for percent in percentiles)]
    rows = []
    for name, words in METRICS.items():
        values = [report.get(f"{kind}_{name}_ms") for kind in kinds]
        if f"mean_{name}_ms" in report:
            rows.append([f"{name.upper()} ({words})", *("-" if v is None else f"{v:.2f}" for v in values)])
    return rows


def _times(good: Sequence[Measurement]) -> dict[str, list[float]]:
    return {
        "ttft": [seen.ttft for seen in good if seen.ttft is not None],
        "tpot": [seen.tpot for seen in good if seen.tpot is not None],
        "itl": [gap for seen in good for gap in seen.gaps],
        "e2el": [seen.e2el for seen in good if seen.e2el is not None],
    }


def _rates(good: Sequence[Measurement], duration_s: float) -> dict[str, Any]:
    taken, made = sum(seen.input_tokens for seen in good), sum(seen.output_tokens for seen in good)
    return {
        "total_input_tokens": taken,
        "total_output_tokens": made,
        "request_throughput": _per_second(len(good), duration_s),
        "input_throughput": _per_second(taken, duration_s),
        "output_throughput": _per_second(made, duration_s),
        "total_token_throughput": _per_second(taken + made, duration_s),
    }


def _per_second(count: int, seconds: float) -> float:
    return round(count / seconds, 4) if seconds > 0 else 0.0


def _errors(failed: Sequence[Measurement]) -> dict[str, Any]:
    counts = Counter(seen.error for seen in failed)
    shown = [{"error": text, "count": count} for text, count in list(counts.items())[:MOST_ERRORS]]
    return {"errors": shown, "other_errors": max(0, len(counts) - MOST_ERRORS)}
