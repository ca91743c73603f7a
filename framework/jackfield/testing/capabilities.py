"""docs/plugins/capabilities.md: what the project's own plugins take of the kit's samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from jackfield.interfaces import FAMILIES, Platform, Plugin, Reason, Request
from jackfield.oracle.codes import KIND
from jackfield.oracle.drafting import need_reasons
from jackfield.oracle.judge import set_reasons
from jackfield.registry import Registry
from jackfield.testing.samples import SAMPLES

OWN = "jackfield"
TOO_MANY = ("models",)
"""Families that have a list of their own."""
OWN_SAMPLES = ("platforms", "quantization_methods", "drafters", "scheduling_policies", "logits_processors")
"""Families whose samples depend on the plugin, or are few."""
YES = "yes"
OF_THE_MACHINE = frozenset({"compiler", "openmp"})
"""Codes of reasons that say something of a machine and nothing of the plugin."""

_INTRODUCTION = """# What the project's plugins take

<!-- Made by `make docs-config`; do not edit. -->

Each row is a request of the conformance kit (`jackfield.testing.samples`). `yes`: the plugin takes it; the
kit's tests, or the project's own, hold its results against a reference. Anything else is the code of the first reason
for which it does not ([reasons](../reference/reasons.md)). Limits of a device are not shown; `jackfield explain`
shows them for the machine that it runs on. Architectures have [a list of their own](../models.md).
"""


def render_capabilities() -> str:
    """Return the document: one table for each family of which the project has plugins."""
    registry = Registry.discover()
    parts = [_INTRODUCTION]
    for family in FAMILIES:
        refs = [ref for ref in registry.refs(family) if ref.distribution == OWN]
        plugins = [plugin for ref in refs if (plugin := ref.load()) is not None]
        if plugins and family not in TOO_MANY:
            rows = _by_plugin(plugins) if family in OWN_SAMPLES else _by_sample(plugins)
            parts.append("\n".join((f"## {family}", "", *rows)) + "\n")
    return "\n".join(parts)


def _by_sample(plugins: Sequence[type[Plugin]]) -> Iterator[str]:
    yield "| | " + " | ".join(f"`{plugin.name}`" for plugin in plugins) + " |"
    yield "|---" * (len(plugins) + 1) + "|"
    for name, request in SAMPLES[plugins[0].family](plugins[0]).items():
        yield f"| {name} | " + " | ".join(_cell(plugin, request) for plugin in plugins) + " |"
    yield "| runs on | " + " | ".join(_names(plugin.device_types) for plugin in plugins) + " |"
    yield "| needs | " + " | ".join(_names(plugin.requires) for plugin in plugins) + " |"


def _by_plugin(plugins: Sequence[type[Plugin]]) -> Iterator[str]:
    yield "| plugin | takes | runs on | needs |"
    yield "|---|---|---|---|"
    for plugin in plugins:
        taken = [name for name, request in SAMPLES[plugin.family](plugin).items() if _cell(plugin, request) == YES]
        takes = "; ".join(_grouped(taken))
        devices = [plugin.device_type] if issubclass(plugin, Platform) else plugin.device_types
        yield f"| `{plugin.name}` | {takes} | {_names(devices)} | {_names(plugin.requires)} |"


def _grouped(names: Iterable[str]) -> Iterator[str]:
    """Yield names of the form ``a, x`` with equal ``x`` together: ``a, b (x, y)``."""
    ends: dict[str, list[str]] = {}
    for name in names:
        start, _, end = name.partition(", ")
        ends.setdefault(start, []).append(end)
    alike: dict[tuple[str, ...], list[str]] = {}
    for start, found in ends.items():
        alike.setdefault(tuple(found), []).append(start)
    for detail, starts in alike.items():
        yield ", ".join(starts) + (f" ({', '.join(detail)})" if any(detail) else "")


def _names(names: Iterable[str]) -> str:
    found = ", ".join(sorted(names))
    return "any device" if found == "*" else found or "nothing more"


def _cell(plugin: type[Plugin], request: Request) -> str:
    reasons: list[Reason] = sorted(set_reasons(plugin, replace(request, device=None)), key=lambda r: r.code != KIND)
    if plugin.family == "drafters":
        reasons += need_reasons(plugin, request)
    if not reasons:
        reasons = [reason for reason in plugin.check(request) if reason.code not in OF_THE_MACHINE]
    return reasons[0].code if reasons else YES
