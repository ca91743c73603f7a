"""Where things lie, and small readers that the guards share."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CORE = ROOT / "framework" / "jackfield"
PLUGINS = ROOT / "plugins"
DOCS = ROOT / "docs"


def pyproject() -> dict[str, Any]:
    """Return pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def sources(*roots: Path) -> Iterator[tuple[str, str]]:
    """Yield name (relative to the repository) and text of every Python file below the folders."""
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def trees(*roots: Path) -> Iterator[tuple[str, ast.Module]]:
    """Yield name and syntax tree of every Python file below the folders."""
    for name, text in sources(*roots):
        yield name, ast.parse(text)


def plugin_packages() -> list[str]:
    """Return the import names of the plugin packages."""
    return sorted(path.parent.name for path in PLUGINS.glob("*/*/__init__.py"))


def run_python(code: str, *arguments: str) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
