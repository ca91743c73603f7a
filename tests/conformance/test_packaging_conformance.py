"""The kit's packaging test, on the example; and what it must find."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from jackfield.testing import PackagingConformance

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_plugin"


class TestExample(PackagingConformance):
    @pytest.fixture
    def project(self) -> Path:
        return EXAMPLE


def changed(tmp_path: Path, old: str, new: str) -> Path:
    """Return a copy of the example with another pyproject.toml."""
    project = shutil.copytree(EXAMPLE, tmp_path / "project")
    file = project / "pyproject.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    return project


def fixtures(project: Path) -> dict[str, Any]:
    import tomllib

    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    declared = {(group, name) for group, names in metadata["entry-points"].items() for name in names}
    return {"metadata": metadata, "declared": declared}


def test_a_pin_of_torch_is_found(tmp_path: Path) -> None:
    given = fixtures(changed(tmp_path, '["jackfield"]', '["jackfield", "torch==2.13.0"]'))
    with pytest.raises(AssertionError):
        TestExample().test_it_pins_no_version_of_torch(given["metadata"])
    TestExample().test_it_pins_no_version_of_torch(fixtures(EXAMPLE)["metadata"])


def test_a_group_that_does_not_exist_is_found(tmp_path: Path) -> None:
    given = fixtures(changed(tmp_path, "jackfield.drafters.v1", "jackfield.drafter.v1"))
    with pytest.raises(AssertionError):
        TestExample().test_it_is_declared_in_groups_that_exist(given["declared"])
    TestExample().test_it_is_declared_in_groups_that_exist(fixtures(EXAMPLE)["declared"])
