"""Tables of decisions as text. rich is imported only when a table is drawn."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jackfield.oracle.verdict import Decision, Verdict

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WIDTH = 120


def decision_table(verdicts: Iterable[Verdict], chosen: Verdict | None = None, *, width: int = WIDTH) -> str:
    """Return all candidates of one decision as a text table."""
    return draw([candidates(verdicts, chosen)], width=width)


def draw(parts: Sequence[RenderableType], *, width: int = WIDTH, color: bool = False) -> str:
    """Return rich renderables as text, ``width`` columns wide, with terminal colours or without; no trailing blanks."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
        markup=False,
        legacy_windows=False,
    )
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def candidates(verdicts: Iterable[Verdict], chosen: Verdict | None = None) -> Table:
    """Return a table with one row for each candidate: mark, name, owner, band or stage, why."""
    table = _table("", "candidate", "owner", "verdict", "why")
    for verdict in verdicts:
        mark, style = _mark(verdict, chosen)
        stage = verdict.preference.band.name if verdict.preference else f"rejected: {verdict.stage}"
        table.add_row(mark, verdict.name, verdict.owner, stage, _lines(verdict), style=style)
    return table


def overview(decisions: Iterable[Decision]) -> Table:
    """Return a table with one row for each decision."""
    table = _table("choice", "chosen", "owner", "band", "how", "why")
    for decision in decisions:
        chosen = decision.chosen
        table.add_row(decision.place, chosen.name, chosen.owner, decision.band.name, decision.how_text, decision.why)
    return table


def _table(*columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _mark(verdict: Verdict, chosen: Verdict | None) -> tuple[str, str]:
    if verdict == chosen:
        return "*", "green"
    return ("+", "") if verdict.accepted else ("-", "dim")


def _lines(verdict: Verdict) -> str:
    if verdict.accepted:
        return verdict.text
    return "\n".join(
        f"{reason.code}: {reason.detail}{f' -> {reason.remedy}' if reason.remedy else ''}" for reason in verdict.reasons
    )
