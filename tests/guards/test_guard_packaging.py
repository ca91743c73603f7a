"""What is installed and what is shipped."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from repo import CORE, PLUGINS, ROOT, plugin_packages, pyproject


def declared() -> set[tuple[str, str, str]]:
    """Return (group, name, target) of every entry point in pyproject.toml."""
    project = pyproject()["project"]
    tables = {"console_scripts": project["scripts"], **project["entry-points"]}
    return {(group, name, target) for group, table in tables.items() for name, target in table.items()}


def test_installed_entry_points_are_the_declared_ones() -> None:
    points = distribution("jackfield").entry_points
    installed = {(point.group, point.name, point.value) for point in points}
    assert installed == declared(), "reinstall: pip install -e ."


def test_every_package_is_typed_and_listed() -> None:
    config = pyproject()["tool"]
    assert set(config["mypy"]["packages"]) == {"jackfield", *plugin_packages()}
    assert set(config["importlinter"]["root_packages"]) == {"jackfield", *plugin_packages()}
    folders = {f"plugins/{path.parent.parent.name}" for path in PLUGINS.glob("*/*/__init__.py")}
    assert set(config["hatch"]["build"]["targets"]["wheel"]["sources"]) == {"framework", *folders}
    packages = [CORE, *(path.parent for path in PLUGINS.glob("*/*/__init__.py"))]
    assert [str(path) for path in packages if not (path / "py.typed").exists()] == []


@pytest.mark.slow
def test_the_wheel_holds_all_packages(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    shipped = {str(path.relative_to(CORE.parent)) for path in CORE.rglob("*") if _ships(path)}
    for package in PLUGINS.glob("*/*/__init__.py"):
        shipped |= {str(p.relative_to(package.parents[1])) for p in package.parent.rglob("*") if _ships(p)}
    assert shipped - names == set()
    assert {name for name in names if ".dist-info/" not in name} == shipped
    assert any(name.endswith("/LICENSE") for name in names)


def _ships(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts
