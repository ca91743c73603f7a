"""A site of fake distributions for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import Site, site_at


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with site_at(tmp_path) as opened:
        yield opened
