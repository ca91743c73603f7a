"""Whether the distributions that a plugin requires are installed; read from metadata, nothing is imported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement

from jackfield.interfaces import Reason
from jackfield.registry.codes import MISSING_PACKAGE


def missing_packages(requires: Iterable[str]) -> Iterator[Reason]:
    """Yield a reason for each requirement string that the environment does not meet.

    Requirements whose marker does not hold here are met.

    Raises:
        packaging.requirements.InvalidRequirement: a string is not a requirement; plugins are checked for that when
            they load.
    """
    for text in requires:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        found = installed_version(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            yield _reason(requirement, found)


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _reason(requirement: Requirement, found: str | None) -> Reason:
    needed = f"{requirement.name}{_extras(requirement)}{requirement.specifier}"
    if found is None:
        detail = f"{needed} is not installed"
    else:
        detail = f"{requirement.name} {found} is installed, {requirement.specifier} is needed"
    return Reason(MISSING_PACKAGE, requirement.name, detail, f"pip install '{needed}'")


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
