"""``jackfield doctor``: what is wrong with an installation, what would help, and a text that fits a bug report.

Nothing heavy is imported, nothing is changed, and nothing of what it says is secret: paths in the user's home begin
with ``~``, and of variables that hold keys only the names are told.
"""

from __future__ import annotations

import platform
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions, packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from jackfield.registry import PluginRow, Registry

OK, NOTE, FAULT = "ok", "note", "FAULT"
OWN = "jackfield"
PREFIX = "jackfield."
TOOLS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "C compiler": (("cc", "gcc", "clang"), "kernels in C for processors, and Triton, are built with it"),
    "device compiler": (
        ("nvcc", "hipcc", "icpx"),
        "libraries that build kernels for a device need it",
    ),
    "ninja": (("ninja",), "libraries that build kernels when they run need it"),
}
"""Programs by what they are, and who needs them."""
OPTIONAL: Mapping[str, str] = {"triton": "kernels for accelerators are written in it"}
"""Distributions that plugins of the project need on some machines."""
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
WATCHED = (OWN, "torch", "transformers", "numpy", "pydantic")
"""Packages that a folder of the same name may hide."""


class Installation:
    """What is installed, each thing looked up once."""

    @cached_property
    def registry(self) -> Registry:
        """All plugins."""
        from jackfield.registry import Registry

        return Registry.discover()

    @cached_property
    def rows(self) -> list[PluginRow]:
        """One row for each plugin, loaded."""
        return self.registry.rows()

    @cached_property
    def distributions(self) -> list[Distribution]:
        """All distributions, the first of each name."""
        found: dict[str, Distribution] = {}
        for one in distributions():
            if name := one.metadata["Name"]:
                found.setdefault(canonicalize_name(name), one)
        return list(found.values())

    @cached_property
    def with_plugins(self) -> list[Distribution]:
        """Those that declare plugins."""
        return [one for one in self.distributions if any(p.group.startswith(PREFIX) for p in one.entry_points)]

    def places(self, name: str) -> list[Path]:
        """Return where an import name should come from: its owners, installed or in place."""
        places = [source for one in self.with_plugins if (source := editable_source(one)) is not None]
        owners = {canonicalize_name(owner) for owner in self._owners.get(name, ())}
        for one in self.distributions:
            if canonicalize_name(one.metadata["Name"]) in owners:
                places.append(Path(str(one.locate_file(name))))
        return [place.resolve() for place in places]

    @cached_property
    def _owners(self) -> Mapping[str, list[str]]:
        return packages_distributions()


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Args:
        section: ``versions``, ``tools``, ``devices``, ``metadata``, ``shadows``, ``owners``, ``plugins`` or
            ``environment``. level: ``ok``, ``note`` (something could be better) or ``FAULT``. remedy: what to do, or
            ``""``.
    """

    section: str
    level: str
    text: str
    remedy: str = ""

    def line(self) -> str:
        """Return it for people."""
        return f"{self.level:5} {self.section}: {self.text}" + (f"\n      remedy: {self.remedy}" if self.remedy else "")


def doctor(*, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Look for what is wrong with this installation: versions, stale or doubled metadata, packages that hide others,
    missing tools, plugins that do not load. The output fits a bug report. Exit code 2 when something is at fault.

    Parameters
    ----------
    json
        Print JSON.
    """
    from jackfield.cli.tables import print_json

    findings = [tidy(finding) for finding in examine()]
    if json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            print(finding.line())
    return 2 if any(finding.level == FAULT for finding in findings) else 0


def examine() -> Iterator[Finding]:
    """Yield all findings, good ones included. A look that itself fails is a finding too."""
    looks: tuple[Callable[[Installation], Iterable[Finding]], ...] = (
        versions,
        tools,
        devices,
        metadata,
        shadows,
        owners,
        plugins,
        environment,
    )
    installed = Installation()
    for look in looks:
        try:
            yield from look(installed)
        except Exception as error:
            yield Finding(look.__name__, FAULT, f"could not be looked at: {type(error).__name__}: {error}")


def tidy(finding: Finding) -> Finding:
    """Return a finding without the path of the user's home."""
    home = str(Path.home())
    if len(home) < 2:
        return finding
    return Finding(finding.section, finding.level, *(t.replace(home, "~") for t in (finding.text, finding.remedy)))


def versions(installed: Installation) -> Iterator[Finding]:
    """Python, the system, and every distribution that this one requires."""
    from packaging.requirements import Requirement

    from jackfield.registry.requirements import installed_version, missing_packages

    yield Finding("versions", OK, f"Python {platform.python_version()} on {platform.platform()}")
    own = distribution(OWN)
    yield Finding("versions", OK, f"{OWN} {own.version}")
    required = [text for text in own.requires or () if "extra ==" not in text]
    for text in required:
        name = Requirement(text).name
        if not list(missing_packages([text])):
            yield Finding("versions", OK, f"{name} {installed_version(name)}")
    for reason in missing_packages(required):
        yield Finding("versions", FAULT, reason.detail, reason.remedy)


def tools(installed: Installation) -> Iterator[Finding]:
    """Programs and libraries that are needed to build kernels."""
    from jackfield.registry.requirements import installed_version

    for name, (programs, use) in TOOLS.items():
        found = next((path for program in programs if (path := shutil.which(program))), None)
        if found is not None:
            yield Finding("tools", OK, f"{name}: {found}")
        else:
            yield Finding("tools", NOTE, f"{name}: none of {', '.join(programs)} is on PATH", f"{use}; install one")
    for name, use in OPTIONAL.items():
        version = installed_version(name)
        if version is not None:
            yield Finding("tools", OK, f"{name} {version}")
        else:
            yield Finding("tools", NOTE, f"{name} is not installed: {use}", f"pip install {name}")


def devices(installed: Installation) -> Iterator[Finding]:
    """What each platform sees."""
    for row in installed.rows:
        if row.family == "platforms":
            level = FAULT if row.state == "failed" or row.code == "probe_raised" else OK
            yield Finding("devices", level, f"{row.name}: {row.reason or 'present'}")


def metadata(installed: Installation) -> Iterator[Finding]:
    """Entry points that changed since a source folder was installed, and distributions that are there twice."""
    for name, paths in sorted(installed.registry.copies.items()):
        text = f"'{name}' has metadata in {len(paths)} places, the first is used: {', '.join(paths)}"
        yield Finding("metadata", FAULT, text, f"pip uninstall {name} until it is gone, then install it once")
    for found in installed.with_plugins:
        source = editable_source(found)
        if source is None:
            continue
        name, stale = found.metadata["Name"], _stale(found, source)
        if stale:
            text = f"'{name}' was installed before its pyproject.toml changed: {', '.join(stale)}"
            yield Finding("metadata", FAULT, text, f"pip install --no-deps -e {source}")
        else:
            yield Finding("metadata", OK, f"'{name}' is installed in place, and current")


def editable_source(found: Distribution) -> Path | None:
    """Return the folder that a distribution was installed from in place, or None."""
    import json
    from urllib.parse import unquote, urlparse

    told: dict[str, Any] = json.loads(found.read_text("direct_url.json") or "{}")
    if not told.get("dir_info", {}).get("editable"):
        return None
    folder = Path(unquote(urlparse(told["url"]).path))
    return folder if (folder / "pyproject.toml").is_file() else None


def _stale(found: Distribution, source: Path) -> list[str]:
    """Return the entry points in which a source folder differs from what is installed."""
    tables = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
    declared = {
        (group, name, target)
        for group, names in tables.get("project", {}).get("entry-points", {}).items()
        for name, target in names.items()
        if group.startswith(PREFIX)
    }
    points = {(p.group, p.name, p.value) for p in found.entry_points if p.group.startswith(PREFIX)}
    return sorted({f"{group}: {name}" for group, name, _ in declared ^ points})


def shadows(installed: Installation) -> Iterator[Finding]:
    """Folders that are imported in the place of installed packages of the same name."""
    hidden = 0
    for name in dict.fromkeys((*WATCHED, *_plugin_packages(installed))):
        try:
            spec = find_spec(name)
            expected = installed.places(name)
        except (ImportError, ValueError, PackageNotFoundError):
            continue
        if spec is None or not expected:
            continue
        lies = [Path(place).resolve() for place in spec.submodule_search_locations or [str(spec.origin)]]
        if spec.origin is None or not any(lie.is_relative_to(place) for lie in lies for place in expected):
            hidden += 1
            text = f"'{name}' is imported from {', '.join(map(str, lies))} and not from {expected[0]}"
            yield Finding("shadows", FAULT, text, "rename that folder, or run from another one")
    if not hidden:
        yield Finding("shadows", OK, "no folder hides an installed package")


def _plugin_packages(installed: Installation) -> Iterator[str]:
    for found in installed.with_plugins:
        for point in found.entry_points:
            if point.group.startswith(PREFIX):
                yield point.value.partition(":")[0].partition(".")[0]


def owners(installed: Installation) -> Iterator[Finding]:
    """Names that several distributions claim: plugins, and the program itself."""
    claims = {ref.label: ref for ref in installed.registry.refs() if ref.error and ref.error.code == "duplicate_name"}
    for ref in claims.values():
        assert ref.error is not None
        yield Finding("owners", FAULT, ref.error.message, ref.error.remedy)
    scripts = {
        str(found.metadata["Name"])
        for found in installed.distributions
        for point in found.entry_points
        if point.group == "console_scripts" and point.name == OWN
    }
    if others := sorted(scripts - {OWN}):
        text = f"the program '{OWN}' belongs to {', '.join(others)} too: the last one that was installed runs"
        yield Finding(
            "owners", FAULT, text, f"pip uninstall {others[0]}; pip install --force-reinstall --no-deps {OWN}"
        )
    elif not claims:
        yield Finding("owners", OK, "every name has one owner")


def plugins(installed: Installation) -> Iterator[Finding]:
    """Plugins that do not load, and what would be there with one more package."""
    good = 0
    for row in installed.rows:
        label = f"{row.family}.{row.name} ({row.distribution} {row.version})"
        if row.state == "failed":
            yield Finding("plugins", FAULT, row.reason, "fix, update or uninstall it, or name it in plugins.disable")
        elif row.code == "missing_package":
            detail, _, line = row.reason.partition(" (")
            yield Finding("plugins", NOTE, f"{label} would be a candidate: {detail}", line.rstrip(")"))
        else:
            good += 1
    yield Finding("plugins", OK, f"{good} plugins load")


def environment(installed: Installation) -> Iterator[Finding]:
    """Variables that set something, and ones that mean nothing."""
    from jackfield.config.environment import PREFIX as VARIABLES
    from jackfield.config.environment import process_environment, read_variables

    variables = process_environment()
    for name in sorted(name for name in variables if name.startswith(VARIABLES)):
        value = "(not shown)" if any(word in name for word in SECRET) else repr(variables[name])
        yield Finding("environment", OK, f"{name} = {value}")
    problems = read_variables(variables).problems
    for problem in problems:
        yield Finding("environment", FAULT, problem.message, problem.remedy)
    if not problems:
        yield Finding("environment", OK, f"no unknown variable; running {sys.executable}")
