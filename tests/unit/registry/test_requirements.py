"""Packages that a plugin requires."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from fakes import Site
from packaging.version import Version

from jackfield.registry import Registry
from jackfield.registry.requirements import missing_packages


@pytest.mark.parametrize("text", ["pytest", "pytest>=1", "no-such-package; python_version < '3'", "PyTest"])
def test_met(text: str) -> None:
    assert list(missing_packages([text])) == []


def test_absent() -> None:
    (reason,) = missing_packages(["no-such-package[fast]>=2"])
    assert (reason.code, reason.fact) == ("missing_package", "no-such-package")
    assert reason.detail == "no-such-package[fast]>=2 is not installed"
    assert reason.remedy == "pip install 'no-such-package[fast]>=2'"


def test_too_old() -> None:
    above = Version(version("pytest")).major + 1
    (reason,) = missing_packages([f"pytest>={above}"])
    assert reason.detail == f"pytest {version('pytest')} is installed, >={above} is needed"


def test_missing_package_is_no_load_failure(site: Site) -> None:
    site.attention("rocket", "requires = ('no-such-package>=2',)")
    registry = Registry.discover(entry_points=site.points())
    (row,) = registry.rows()
    assert (row.state, row.code) == ("loaded", "missing_package")
    assert row.reason == "no-such-package>=2 is not installed (pip install 'no-such-package>=2')"
    assert [reason.code for reason in registry.refs()[0].missing()] == ["missing_package"]
