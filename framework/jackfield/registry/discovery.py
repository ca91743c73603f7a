"""Which plugins are installed: entry points of all distributions, read without importing any plugin."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import Distribution, EntryPoint, distributions

from packaging.utils import canonicalize_name

from jackfield.errors import did_you_mean
from jackfield.interfaces import FAMILIES, HOOK_GROUP
from jackfield.registry.adapters import ADAPTERS, Adapters, adapted
from jackfield.registry.codes import LOAD_FAILED
from jackfield.registry.ref import PluginFailure, PluginRef, RefusedError
from jackfield.registry.validation import api_mismatch, validator

PREFIX = "jackfield."
HOOKS = "hooks"
_GROUP = re.compile(r"jackfield\.(?P<family>\w+)\.v(?P<major>\d+)")


@dataclass(slots=True)
class Discovered:
    """What was found.

    Args:
        refs: one for each entry point, unusable ones included.
        copies: for each distribution with more than one set of metadata: all their paths, the one in use first.
    """

    refs: list[PluginRef] = field(default_factory=list)
    copies: dict[str, tuple[str, ...]] = field(default_factory=dict)


def discover(
    entry_points: Iterable[EntryPoint] | None,
    validate_hook: Callable[[object], object],
    adapters: Adapters = ADAPTERS,
) -> Discovered:
    """Return refs for ``entry_points``, or for all installed ones. Imports nothing and never raises for a plugin."""
    found = Discovered()
    points = _installed(found) if entry_points is None else iter(entry_points)
    # Each look at a distribution's metadata reads and parses the whole file, and one distribution may bring hundreds.
    owner_of = cache(_owner)
    for point in points:
        if point.group.startswith(PREFIX):
            found.refs.append(_ref(point, owner_of(point.dist), validate_hook, adapters))
    found.refs = list({(*ref.sort_key, ref.family, ref.stage): ref for ref in found.refs}.values())
    return found


def metadata_path(distribution: Distribution) -> str:
    """Return the folder of a distribution's metadata, or the folder that holds it where that is not known."""
    return str(getattr(distribution, "_path", None) or distribution.locate_file(""))


def _installed(found: Discovered) -> Iterator[EntryPoint]:
    seen: set[str] = set()
    for distribution in distributions():
        try:
            text = distribution.read_text("entry_points.txt") or ""
            if PREFIX not in text:
                continue
            name = canonicalize_name(distribution.metadata["Name"])
            if name not in seen:
                seen.add(name)
                yield from tuple(_in_use(name, found).entry_points)
        except Exception as error:
            found.refs.append(_broken(distribution, error))


def _in_use(name: str, found: Discovered) -> Distribution:
    copies = {metadata_path(copy): copy for copy in distributions(name=name)}
    if len(copies) > 1:
        found.copies[name] = tuple(copies)
    return next(iter(copies.values()))


def _broken(distribution: Distribution, error: Exception) -> PluginRef:
    path = metadata_path(distribution)
    ref = PluginRef("unknown", path.rpartition("/")[2], path.rpartition("/")[2], "", "", path)
    ref.refuse(PluginFailure.of(error, LOAD_FAILED, "metadata"))
    return ref


def _ref(
    point: EntryPoint,
    owned_by: tuple[str, str, str],
    validate_hook: Callable[[object], object],
    adapters: Adapters,
) -> PluginRef:
    owner, version, path = owned_by
    match = _GROUP.fullmatch(point.group)
    family = match["family"] if match else point.group.removeprefix(PREFIX)
    ref = PluginRef(family, point.name, owner, version, point.value, path)
    if point.group == HOOK_GROUP:
        ref.validate = validate_hook
    elif match is None:
        ref.refuse(_unknown_group(point.group).failure)
    elif family in FAMILIES and (adapter := adapters.get((family, int(match["major"])))) is not None:
        ref.validate = adapted(adapter, FAMILIES[family], ref, int(match["major"]))
    elif family not in FAMILIES or int(match["major"]) != FAMILIES[family].version[0]:
        ref.refuse(api_mismatch(family, match["major"]).failure)
    else:
        ref.validate = validator(FAMILIES[family], point.name)
    return ref


def _owner(distribution: Distribution | None) -> tuple[str, str, str]:
    """Return its name, its version and the folder of its metadata."""
    if distribution is None:
        return "unknown", "", ""
    metadata: Mapping[str, str] = distribution.metadata  # type: ignore[assignment]
    return metadata["Name"], metadata["Version"] or "", metadata_path(distribution)


def _unknown_group(group: str) -> RefusedError:
    known = [family.group for family in FAMILIES.values()]
    return RefusedError(LOAD_FAILED, "metadata", f"unknown entry-point group '{group}'", did_you_mean(group, known))
