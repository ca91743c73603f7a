"""What benchmarks print and write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_RATES = {
    "request_throughput": "requests/s",
    "input_throughput": "input tokens/s",
    "output_throughput": "output tokens/s",
    "request_goodput": "good requests/s",
}


def heading(kind: str) -> dict[str, Any]:
    """Return what the JSON of every benchmark begins with."""
    from jackfield import __version__

    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"benchmark": kind, "date": now, "jackfield_version": __version__}


def print_report(report: Mapping[str, Any], percentiles: Sequence[float]) -> None:
    """Print counts, rates and a table of latencies."""
    from jackfield.benchmarking.report import table_rows
    from jackfield.cli.tables import print_table

    counts = ("completed", "failed", "unfinished", "unsent", "rounds")
    words = [f"{report[name]} {name}" for name in counts if report.get(name) or name in ("completed", "failed")]
    print(f"{', '.join(words)} in {report['duration']:.2f} s")
    print(f"tokens: {report['total_input_tokens']} in, {report['total_output_tokens']} out")
    print(", ".join(f"{report[name]:.2f} {unit}" for name, unit in _RATES.items() if name in report))
    columns = ["ms", "mean", "median", "std", *(f"p{percent:g}" for percent in percentiles)]
    print_table(columns, table_rows(dict(report), percentiles))
    for entry in report.get("errors", ()):
        print(f"failed {entry['count']}×: {entry['error']}")
    if report.get("other_errors"):
        print(f"and {report['other_errors']} further errors")


def write_json(path: Path | None, data: Mapping[str, Any]) -> None:
    """Write the figures, when there is a file to write them to."""
    from jackfield.cli.output import tell

    if path is not None:
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        tell(f"wrote {path}")
