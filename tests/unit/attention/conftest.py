"""What tests of FlashInfer's backends have in common."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package ``flashinfer`` without kernels, and neither compiler nor cache."""
    folder = tmp_path / "site" / "flashinfer"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    facts = folder.parent / "flashinfer_python-0.6.18.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.6.18\n")
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("jackfield_attention.flashinfer.TOOLKIT", tmp_path / "bin" / "nvcc")
    return folder
