"""Differences between two decision reports, for ``jackfield explain --diff``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jackfield.oracle.verdict import place

Data = Mapping[str, Any]


def diff_reports(a: Data, b: Data) -> list[str]:
    """Return what differs between two reports as data, one line each; empty when they say the same."""
    return [*_decisions(a, b), *_proposals(a, b), *_lists(a, b), *_environment(a, b)]


def _decisions(a: Data, b: Data) -> Iterator[str]:
    left, right = (_by_place(report) for report in (a, b))
    for at in dict.fromkeys([*left, *right]):
        if at not in right:
            yield f"{at}: {_chosen(left[at])} -> not decided"
        elif at not in left:
            yield f"{at}: not decided -> {_chosen(right[at])}"
        else:
            yield from _decision(at, left[at], right[at])


def _by_place(report: Data) -> dict[str, Data]:
    return {place(decision["family"], decision["request"]): decision for decision in report["decisions"]}


def _decision(at: str, a: Data, b: Data) -> Iterator[str]:
    if _chosen(a) != _chosen(b):
        yield f"{at}: {_chosen(a)} -> {_chosen(b)}"
    if a["how"] != b["how"]:
        yield f"{at}: {a['how']} -> {b['how']}"
    left, right = ({_candidate(v): _verdict(v) for v in decision["verdicts"]} for decision in (a, b))
    for name in dict.fromkeys([*left, *right]):
        before, after = left.get(name, "not installed"), right.get(name, "not installed")
        if before != after:
            yield f"{at}: candidate {name}: {before} -> {after}"


def _chosen(decision: Data) -> str:
    chosen = decision["chosen"]
    owner = f"{chosen['distribution']} {chosen['version']}".rstrip()
    return f"{chosen['name']} ({owner}, {chosen['preference']['band']})"


def _candidate(verdict: Data) -> str:
    return f"{verdict['name']} ({verdict['distribution']})"


def _verdict(verdict: Data) -> str:
    if verdict["preference"]:
        return f"accepted ({verdict['preference']['band']})"
    return f"rejected ({', '.join(reason['code'] for reason in verdict['reasons'])})"


def _proposals(a: Data, b: Data) -> Iterator[str]:
    left, right = ({entry["field"]: entry for entry in report["proposals"]} for report in (a, b))
    for name in dict.fromkeys([*left, *right]):
        before, after = (_proposal(side.get(name)) for side in (left, right))
        if before != after:
            yield f"proposal {name}: {before} -> {after}"


def _proposal(entry: Data | None) -> str:
    if entry is None:
        return "none"
    return f"{entry['value']} ({'applied' if entry['applied'] else 'not applied'})"


def _lists(a: Data, b: Data) -> Iterator[str]:
    for what, left, right in (
        ("note", a["notes"], b["notes"]),
        ("counterfactual", *([_said(entry) for entry in report["counterfactuals"]] for report in (a, b))),
    ):
        yield from (f"{what} only in the first: {text}" for text in left if text not in right)
        yield from (f"{what} only in the second: {text}" for text in right if text not in left)


def _said(entry: Data) -> str:
    return f"{entry['field']} = {entry['value']} excluded {entry['name']} ({entry['band']})"


def _environment(a: Data, b: Data) -> Iterator[str]:
    left, right = (_flat(report["environment"]) for report in (a, b))
    for name in dict.fromkeys([*left, *right]):
        before, after = left.get(name, "none"), right.get(name, "none")
        if before != after:
            yield f"environment: {name} {before} -> {after}"


def _flat(environment: Data) -> dict[str, str]:
    rest = {name: str(value) for name, value in environment.items() if name != "distributions"}
    return {**rest, **environment.get("distributions", {})}
