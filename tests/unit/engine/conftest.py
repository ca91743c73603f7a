"""One tiny model for all engines of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine_world import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep settings of the developer's own environment out."""
    monkeypatch.setattr("jackfield.config.load.process_environment", dict)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices gain little from threads, and threads that wait for each other on a busy machine lose much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
