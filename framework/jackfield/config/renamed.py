"""Settings of other engines, recognised by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from jackfield.config.origin import Problem


@dataclass(frozen=True, slots=True)
class Renamed:
    """One setting that is called otherwise elsewhere.

    Args:
        name: how it is called there. to: the setting here, or ``""``. same: whether it means exactly the same, so that
            the name is accepted. note: what to do instead.
    """

    name: str
    to: str
    same: bool
    note: str

    def problem(self) -> Problem:
        """Return the problem of using this name, with its replacement."""
        remedy = f"use {self.to}" if self.to else ""
        remedy = "; ".join(part for part in (remedy, self.note) if part)
        return Problem(self.name, f"'{self.name}' is a setting of another engine and not one of this", remedy=remedy)


@cache
def table() -> dict[str, Renamed]:
    """Return all known names."""
    data = json.loads(files("jackfield.config").joinpath("renamed.json").read_text(encoding="utf-8"))
    return {
        name: Renamed(name, row.get("to", ""), row.get("same", False), row.get("note", ""))
        for name, row in data.items()
    }
