"""The minimal attention plugin stays minimal: the example's backend code, comments and blank lines included."""

from __future__ import annotations

from repo import ROOT

SOURCES = ROOT / "examples" / "third_party_plugin" / "src"
LIMIT = 100


def test_example_backend_is_at_most_100_lines() -> None:
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in sorted(SOURCES.rglob("*.py"))}
    assert {"backend.py", "layer.py"} <= lines.keys()
    assert sum(lines.values()) <= LIMIT, lines
