"""Kernel tests run in Triton's interpreter, which an environment variable switches on when triton is imported: they
need a process of their own, ``TRITON_INTERPRET=1 pytest tests/kernels``. Elsewhere every module counts as skipped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "unit" / "quantization"), str(TESTS / "shared")]


def missing() -> str:
    """Return what keeps the tests from running, or an empty text."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "needs TRITON_INTERPRET=1, set before the process starts"
    return ""


class SkippedModule(pytest.Module):
    """A module that is not imported."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip(missing())


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return SkippedModule.from_parent(parent, path=module_path) if missing() else None
