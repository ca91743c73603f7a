"""A distribution as a stranger has it: a wheel, installed into a fresh environment, used, and gone without a trace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, ClassVar

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jackfield.config.environment import process_environment
from jackfield.interfaces import FAMILIES, HOOK_GROUP

SECONDS = 300


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment that sees this environment's packages, but for what is installed in it.

    Args:
        folder: where it lies. path: of programs, for its processes.
    """

    folder: Path
    path: str = "/usr/local/bin:/usr/bin:/bin"

    @classmethod
    def create(cls, folder: Path, without: str = "") -> Environment:
        """Make one; nothing is downloaded. The distribution ``without`` is not seen, should it be installed here."""
        venv.create(folder, with_pip=False)
        made = cls(folder)
        site = Path(made.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        hidden = _top_level(without) if without else frozenset()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if entry.name not in hidden and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
        return made

    @property
    def python(self) -> str:
        """The interpreter."""
        return str(self.folder / "bin" / "python")

    def run(self, *arguments: str) -> str:
        """Run Python in the environment's folder and return what it prints; fails with what it says."""
        done = subprocess.run(
            [self.python, *arguments],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={"HOME": str(self.folder), "PATH": self.path},
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def jackfield(self, *arguments: str) -> str:
        """Run the command line."""
        return self.run("-m", "jackfield.cli", *arguments)

    def install(self, *what: str) -> None:
        """Install wheels or folders, and nothing that they require."""
        pip("--python", self.python, "install", "--no-deps", "--no-index", "--no-build-isolation", *what)

    def uninstall(self, distribution: str) -> None:
        """Uninstall a distribution."""
        pip("--python", self.python, "uninstall", "--yes", distribution)

    def plugins(self, distribution: str) -> dict[str, dict[str, Any]]:
        """Return the rows of a distribution's plugins, by name."""
        rows = json.loads(self.jackfield("plugins", "--json"))
        wanted = canonicalize_name(distribution)
        return {row["name"]: row for row in rows if canonicalize_name(row["distribution"]) == wanted}


def pip(*arguments: str) -> None:
    """Run this environment's pip; fails with what it says."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    # What is on PYTHONPATH is no part of the environment that pip works on.
    environment = {name: value for name, value in process_environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def _top_level(name: str) -> frozenset[str]:
    """Return what a distribution has in site-packages."""
    try:
        files = distribution(name).files or ()
    except PackageNotFoundError:
        return frozenset()
    return frozenset(file.parts[0] for file in files if file.parts[0] != "..")


def build_wheel(project: Path, folder: Path) -> Path:
    """Build a project's wheel into ``folder``, from a copy, so that nothing is left behind in the project."""
    ignore = shutil.ignore_patterns("build", "dist", "*.egg-info", ".*", "__pycache__")
    copy = shutil.copytree(project, folder / "source", ignore=ignore)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "wheels"), str(copy))
    (wheel,) = (folder / "wheels").glob("*.whl")
    return wheel


@pytest.mark.slow
class PackagingConformance:
    """Write the fixture ``project``: the folder with pyproject.toml."""

    group_prefix: ClassVar[str] = "jackfield."

    @pytest.fixture
    def project(self) -> Path:
        """The project's folder; written by the author."""
        pytest.fail(f"write a fixture 'project' in {type(self).__name__} that returns the folder with pyproject.toml")

    @pytest.fixture
    def metadata(self, project: Path) -> dict[str, Any]:
        """The ``project`` table."""
        found: dict[str, Any] = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return found

    @pytest.fixture
    def declared(self, metadata: dict[str, Any]) -> set[tuple[str, str]]:
        """(group, name) of every plugin."""
        tables = metadata.get("entry-points", {})
        return {(group, name) for group in tables if group.startswith(self.group_prefix) for name in tables[group]}

    @pytest.fixture
    def environment(self, project: Path, metadata: dict[str, Any], tmp_path: Path) -> Environment:
        """A fresh environment with the project's wheel in ``wheels``."""
        build_wheel(project, tmp_path)
        return Environment.create(tmp_path / "venv", without=metadata["name"])

    def test_it_is_declared_in_groups_that_exist(self, declared: set[tuple[str, str]]) -> None:
        """Each plugin is in the group of a family of this core, or of hooks."""
        groups = {family.group for family in FAMILIES.values()} | {HOOK_GROUP}
        assert declared and {group for group, _ in declared} <= groups

    def test_it_pins_no_version_of_torch(self, metadata: dict[str, Any]) -> None:
        """Installing a plugin must not replace the torch that the machine's vendor built."""
        pinned = [
            text
            for text in metadata.get("dependencies", [])
            if canonicalize_name((found := Requirement(text)).name) == "torch"
            and any(part.operator in ("==", "===", "~=") for part in found.specifier)
        ]
        assert pinned == []

    def test_built_installed_used_and_gone(
        self, metadata: dict[str, Any], declared: set[tuple[str, str]], environment: Environment, tmp_path: Path
    ) -> None:
        """The wheel holds its own packages alone; installed, its plugins load; uninstalled, nothing remains."""
        name = metadata["name"]
        (wheel,) = (tmp_path / "wheels").glob("*.whl")
        files = {entry for entry in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in entry}
        assert files and not any(entry.startswith(("tests/", "jackfield/")) for entry in files)
        before = _files(environment.folder)
        environment.install(str(wheel))
        rows = environment.plugins(name)
        assert set(rows) >= {name for _, name in declared}
        assert {row["state"] for row in rows.values()} == {"loaded"}, rows
        for family_name in sorted({name for group, name in declared if group != HOOK_GROUP}):
            environment.jackfield("plugins", "check", family_name)
        environment.uninstall(name)
        assert environment.plugins(name) == {}
        assert {path for path in _files(environment.folder) - before if "__pycache__" not in path} == set()


def _files(folder: Path) -> set[str]:
    """Return the files below a folder, and none behind links."""
    return {str(Path(root) / name) for root, _, names in os.walk(folder) for name in names}
