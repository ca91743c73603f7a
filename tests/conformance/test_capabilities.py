"""The table of what the project's plugins take is current."""

from __future__ import annotations

from pathlib import Path

from jackfield.testing.capabilities import render_capabilities

PAGE = Path(__file__).parents[2] / "docs" / "plugins" / "capabilities.md"


def test_the_table_is_what_the_kit_makes() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_capabilities(), "run: make docs-config (and reinstall)"
