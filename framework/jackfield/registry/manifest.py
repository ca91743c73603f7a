"""Manifest: the chosen plugins as data, so that every worker process loads exactly those."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from jackfield.errors import PluginError
from jackfield.interfaces import FAMILIES, HOOK_GROUP
from jackfield.registry.adapters import ADAPTERS, Adapters, adapted
from jackfield.registry.discovery import HOOKS
from jackfield.registry.hooks import validate_hooks
from jackfield.registry.ref import PluginRef
from jackfield.registry.validation import validator


@dataclass(frozen=True, slots=True, order=True)
class ManifestEntry:
    """One plugin: where it comes from and where its class lies."""

    family: str
    name: str
    distribution: str
    version: str
    target: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The frozen list, sorted, and the sha256 over it (hex)."""

    plugins: tuple[ManifestEntry, ...]
    digest: str

    @classmethod
    def of(cls, refs: Iterable[PluginRef]) -> Manifest:
        """Return the manifest of ``refs``; order and repetition do not matter."""
        entries = {ManifestEntry(ref.family, ref.name, ref.distribution, ref.version, ref.target) for ref in refs}
        plugins = tuple(sorted(entries))
        return cls(plugins, _digest(plugins))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Manifest:
        """Return the manifest that :meth:`to_dict` wrote.

        Raises:
            PluginError: the digest does not belong to the list.
        """
        plugins = tuple(ManifestEntry(**entry) for entry in data["plugins"])
        manifest = cls(plugins, data["digest"])
        manifest.verify()
        return manifest

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able data."""
        return {"plugins": [asdict(entry) for entry in self.plugins], "digest": self.digest}

    def verify(self) -> None:
        """Raise PluginError unless the digest belongs to the list."""
        found = _digest(self.plugins)
        if found != self.digest:
            message = f"the plugin manifest was changed: its digest is {found}"
            raise PluginError(message, field="manifest.digest", value=self.digest)


def refs_of(manifest: Manifest, adapters: Adapters = ADAPTERS) -> list[PluginRef]:
    """Return loaded refs for exactly the plugins of ``manifest``.

    Raises:
        PluginError: the installed distributions differ from the manifest (with all differences), or a plugin does not
            load.
    """
    manifest.verify()
    refuse_in_process([entry.name for entry in manifest.plugins if entry.distribution.startswith("(")])
    differences = [line for entry in manifest.plugins for line in _differences(entry, adapters)]
    if differences:
        remedy = "install the same versions everywhere"
        text = "installed plugins differ from the manifest:\n  " + "\n  ".join(differences)
        raise PluginError(text, field="manifest.digest", value=manifest.digest, remedy=remedy)
    refs = [_ref(entry, adapters) for entry in manifest.plugins]
    for ref in refs:
        if ref.load_object() is None:
            raise PluginError(ref.sentence(), field=ref.label, value=ref.target)
    return refs


def refuse_in_process(names: list[str]) -> None:
    """Raise PluginError when ``names``, plugins registered by a call, is not empty."""
    if names:
        message = f"plugins registered in this process cannot be used in worker processes: {', '.join(names)}"
        raise PluginError(
            message, field="plugins", value=names, remedy="register through an entry point of an installed distribution"
        )


def _ref(entry: ManifestEntry, adapters: Adapters) -> PluginRef:
    ref = PluginRef(entry.family, entry.name, entry.distribution, entry.version, entry.target)
    family = FAMILIES.get(entry.family)
    ref.validate = validator(family, entry.name) if family else validate_hooks
    old = _old_major(entry, adapters)
    if family and old is not None:
        ref.validate = adapted(adapters[entry.family, old], family, ref, old)
    return ref


def _old_major(entry: ManifestEntry, adapters: Adapters) -> int | None:
    """Return the previous major version that the entry's plugin is declared for, or None."""
    for major in (major for family, major in adapters if family == entry.family):
        points = distribution(entry.distribution).entry_points.select(
            group=f"jackfield.{entry.family}.v{major}", name=entry.name
        )
        if entry.target in {point.value for point in points}:
            return major
    return None


def _differences(entry: ManifestEntry, adapters: Adapters) -> list[str]:
    label = f"{entry.family}.{entry.name}"
    if (group := _group(entry.family)) is None:
        return [f"{label}: this core has no family '{entry.family}'"]
    try:
        found = distribution(entry.distribution)
    except PackageNotFoundError:
        return [f"{label}: {entry.distribution} {entry.version} is not installed"]
    if found.version != entry.version:
        return [f"{label}: {entry.distribution} {entry.version} expected, {found.version} installed"]
    targets = [point.value for point in found.entry_points.select(group=group, name=entry.name)]
    if entry.target not in targets and _old_major(entry, adapters) is None:
        return [f"{label}: {entry.target} expected, {' and '.join(targets) or 'nothing'} declared"]
    return []


def _group(family: str) -> str | None:
    if family == HOOKS:
        return HOOK_GROUP
    return FAMILIES[family].group if family in FAMILIES else None


def _digest(plugins: tuple[ManifestEntry, ...]) -> str:
    text = json.dumps([asdict(entry) for entry in plugins], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
