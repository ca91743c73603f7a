"""The minimal attention plugin stays minimal: the example's backend code, comments and blank lines included."""

from __future__ import annotations

from repo import ROOT

SOURCES = ROOT / "examples" / "third_party_plugin" / "src"
LIMIT = 100


def test_example_backend_is_at_most_100_lines() -> None:
    files = [*SOURCES.rglob("backend.py"), *SOURCES.rglob("layer.py")]
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert lines.keys() == {"backend.py", "layer.py"}
    assert sum(lines.values()) <= LIMIT, lines
