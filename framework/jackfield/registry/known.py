"""Distributions that are known to offer what an installation lacks, for error messages. Data, not a dependency."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("known_plugins.json")


@dataclass(frozen=True, slots=True)
class KnownDistribution:
    """A distribution and the line that installs it."""

    name: str
    pip: str


def known_distributions(family: str, kind: str, table: Path = TABLE) -> tuple[KnownDistribution, ...] | None:
    """Return the distributions that offer ``kind`` (a format, an architecture, a layer kind) of ``family``.

    Empty when the kind is known and nobody offers it yet; None when nothing is known about it.
    """
    entries = json.loads(table.read_text(encoding="utf-8")).get(family, {}).get(kind)
    return None if entries is None else tuple(KnownDistribution(**entry) for entry in entries)
