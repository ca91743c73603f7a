"""The two servers of these tests. Not in conftest.py: other folders have files of that name too."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "server_operations"))

from served import Served

TIMEOUT_S = 4.0
__all__ = ["TIMEOUT_S", "Pair", "Served"]


@dataclass(frozen=True)
class Pair:
    """A server that generates, and one that makes vectors."""

    writer: Served
    embedder: Served

    @property
    def both(self) -> tuple[Served, Served]:
        return self.writer, self.embedder
