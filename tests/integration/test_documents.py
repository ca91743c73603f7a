"""Python in the documents: all of it is Python, and what a newcomer copies first runs as it stands."""

from __future__ import annotations

import ast
import asyncio
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [ROOT / "README.md", ROOT / "docs" / "quickstart.md"]
BLOCK = re.compile(r"^( *)```python[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page."""
    return [textwrap.dedent(text) for _, text in BLOCK.findall(page.read_text(encoding="utf-8"))]


def test_all_of_it_is_python() -> None:
    found = [(page, text) for page in PAGES for text in blocks(page)]
    assert len(found) >= 10
    for page, text in found:
        ast.parse(f"async def page():\n{textwrap.indent(text, '    ')}\n    pass\n", filename=str(page))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(("page", "number"), [(page, n) for page in RUN for n in range(len(blocks(page)))])
def test_what_is_copied_first_runs(page: Path, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    text = blocks(page)[number]
    code = f"async def page():\n{textwrap.indent(text, '    ')}\n    return locals()\n"
    names: dict[str, Any] = {}
    exec(compile(code, str(page), "exec"), names)
    left = asyncio.run(names["page"]())
    if "llm" in left and hasattr(left["llm"], "generate") and "await" not in text:
        left["llm"].shutdown()
    assert capsys.readouterr().out.strip() or "print" not in text
