"""Tests of the real device, ``pytest -m gpu tests/device``. Elsewhere every module counts as skipped, and none is
imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))


def missing() -> str:
    """Return what keeps the tests from running, or an empty text."""
    import torch

    if not torch.cuda.is_available():
        return "needs a CUDA device"
    return "" if find_spec("triton") else "triton is not installed"


class SkippedModule(pytest.Module):
    """A module that is not imported."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip(missing())


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return SkippedModule.from_parent(parent, path=module_path) if missing() else None
