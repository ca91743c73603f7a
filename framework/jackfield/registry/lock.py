"""The plugin lock: which distributions with plugins an installation has, with versions and hashes of their files.

An engine that is started with ``plugins.lock`` refuses to start when anything differs. It is checked before any plugin
is imported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from jackfield.errors import ConfigError, PluginError
from jackfield.registry.ref import PluginRef, PluginState

VERSION = 1
FIELD = "plugins.lock"
REMEDY = "install what the lock names, or write it anew with: jackfield plugins lock"
_UNSTABLE = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"})
"""Files of metadata that say how something was installed, and not what."""


@dataclass(frozen=True, slots=True, order=True)
class LockedDistribution:
    """One distribution.

    Args:
        name, version: of the distribution. sha256: over paths and contents of its files. plugins: ``family.name``.
    """

    name: str
    version: str
    sha256: str
    plugins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PluginLock:
    """All distributions with plugins that are not kept out, by name."""

    distributions: tuple[LockedDistribution, ...]

    @classmethod
    def of(cls, refs: Iterable[PluginRef]) -> PluginLock:
        """Return the lock of what is installed."""
        owned: dict[str, list[PluginRef]] = {}
        for ref in refs:
            if not ref.in_process and ref.state is not PluginState.DISABLED:
                owned.setdefault(canonicalize_name(ref.distribution), []).append(ref)
        return cls(tuple(_locked(owned[name]) for name in sorted(owned)))

    def text(self) -> str:
        """Return the file's content."""
        data = {"version": VERSION, "distributions": [asdict(entry) for entry in self.distributions]}
        return json.dumps(data, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> PluginLock:
        """Return the lock in a file.

        Raises:
            ConfigError: it cannot be read, or is no lock of this version.
        """
        try:
            data: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if data["version"] != VERSION:
                raise ValueError(f"its version is {data['version']}, this core reads {VERSION}")
            entries = [LockedDistribution(**{**e, "plugins": tuple(e["plugins"])}) for e in data["distributions"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            message = f"the plugin lock cannot be read: {type(error).__name__}: {error}"
            raise ConfigError(message, field=FIELD, value=str(path), remedy=REMEDY) from None
        return cls(tuple(entries))

    def check(self, refs: Iterable[PluginRef], path: Path) -> None:
        """Compare with what is installed.

        Raises:
            PluginError: something differs; every difference is named, with both versions.
        """
        found = {entry.name: entry for entry in PluginLock.of(refs).distributions}
        locked = {entry.name: entry for entry in self.distributions}
        faults = [
            fault
            for name in sorted(found.keys() | locked.keys())
            if (fault := _fault(locked.get(name), found.get(name)))
        ]
        if faults:
            text = "installed plugins differ from the lock:\n  " + "\n  ".join(faults)
            raise PluginError(text, field=FIELD, value=str(path), remedy=REMEDY)


def check_lock(path: str, refs: Iterable[PluginRef]) -> None:
    """Raise unless what is installed is what the lock at ``path`` says. Imports no plugin."""
    PluginLock.read(Path(path).expanduser()).check(refs, Path(path))


def _locked(refs: list[PluginRef]) -> LockedDistribution:
    first = refs[0]
    plugins = tuple(sorted({ref.label for ref in refs}))
    return LockedDistribution(canonicalize_name(first.distribution), first.version, _digest(refs), plugins)


def _fault(locked: LockedDistribution | None, found: LockedDistribution | None) -> str:
    if locked is None:
        assert found is not None
        return f"{found.name} {found.version} ({', '.join(found.plugins)}) is installed and not in the lock"
    if found is None:
        return f"{locked.name} {locked.version} ({', '.join(locked.plugins)}) is not installed"
    if locked.version != found.version:
        return f"{locked.name}: {locked.version} is locked, {found.version} is installed"
    if locked.plugins != found.plugins:
        changed = ", ".join(sorted(set(locked.plugins) ^ set(found.plugins)))
        return f"{locked.name} {locked.version}: it declares other plugins: {changed}"
    if locked.sha256 != found.sha256:
        return f"{locked.name} {locked.version}: files differ: {locked.sha256[:12]} locked, {found.sha256[:12]} found"
    return ""


def _digest(refs: list[PluginRef]) -> str:
    """Return the sha256 over all files of an owner: those that it installed, and packages that its plugins lie in."""
    total = hashlib.sha256()
    try:
        files = dict(_installed(distribution(refs[0].distribution)))
    except PackageNotFoundError:
        files = {}
    for package in sorted({ref.target.partition(":")[0].partition(".")[0] for ref in refs}):
        files.update(_package(package))
    for name in sorted(files):
        total.update(name.encode() + b"\0" + hashlib.sha256(files[name].read_bytes()).digest())
    return total.hexdigest()


def _installed(found: Distribution) -> Iterator[tuple[str, Path]]:
    for file in found.files or ():
        path = Path(str(found.locate_file(file)))
        unstable = file.suffix in (".pyc", ".pth") or (file.name in _UNSTABLE and ".dist-info" in str(file.parent))
        if not unstable and ".." not in file.parts and path.is_file():
            yield file.as_posix(), path


def _package(name: str) -> Iterator[tuple[str, Path]]:
    """Yield the sources of a top-level package or module, wherever it lies. Finding it imports nothing."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return
    if spec is None:
        return
    for folder in spec.submodule_search_locations or ():
        for path in Path(folder).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                yield f"{name}/{path.relative_to(folder).as_posix()}", path
    if spec.submodule_search_locations is None and spec.origin:
        yield Path(spec.origin).name, Path(spec.origin)
