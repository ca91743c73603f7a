"""What the picture of a sweep shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jackfield.benchmarking.chart import Line, Panel, draw
from jackfield.benchmarking.statistics import METRICS

_SHOWN = ("ttft", "tpot")


def picture(title: str, note: str, runs: Sequence[Mapping[str, Any]], percentiles: Sequence[float]) -> str:
    """Return the SVG of runs: median and percentiles of TTFT and TPOT against output tokens per second. Runs in which
    nothing succeeded have no point.

    Args:
        runs: reports of :func:`serve_report` with ``load``, the label of a point.
    """
    kinds = {"median": "median", **{f"p{percent:g}": f"p{percent:g}" for percent in sorted(percentiles)[-3:]}}
    panels, measured = [], [run for run in runs if run["completed"]]
    for metric in _SHOWN:
        found = [run for run in measured if run[f"median_{metric}_ms"] is not None]
        lines = tuple(
            Line(name, tuple((run["output_throughput"], run[f"{kind}_{metric}_ms"]) for run in found))
            for kind, name in kinds.items()
        )
        panels.append(Panel(f"{metric.upper()}: {METRICS[metric]}", lines))
    return draw(title, note, panels, [str(run["load"]) for run in measured])
