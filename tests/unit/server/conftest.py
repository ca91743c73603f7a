"""Keeps settings of the developer's own environment out."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield.config.load.process_environment", dict)
