"""docs/reference/plugins.md and metrics.md: what is installed with Jackfield, and what servers tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NOTE = "<!-- Made by `make docs-config`; do not edit. -->"
OWN = "jackfield"


def render_plugins() -> str:
    """Return the page about the project's own plugins."""
    return "\n".join(_plugins()) + "\n"


def render_metrics() -> str:
    """Return the page about metrics."""
    return "\n".join(_metrics()) + "\n"


def _plugins() -> Iterator[str]:
    from jackfield.interfaces import FAMILIES

    yield from ("# Plugins of the project", "", NOTE, "")
    yield "Others are found as these are. `jackfield plugins` lists what is installed;"
    yield "architectures are on [their own page](../models.md)."
    for family, entry in FAMILIES.items():
        rows = [] if family == "models" else list(_rows(family))
        if rows:
            yield from ("", f"## {family.replace('_', ' ').capitalize()}", "", f"Group `{entry.group}`.", "")
            yield from ("| name | what it is | kinds | needs |", "|---|---|---|---|", *rows)


def _rows(family: str) -> Iterator[str]:
    from jackfield.config import EngineConfig
    from jackfield.registry import Registry

    registry = Registry.discover(EngineConfig().plugins)
    for ref in sorted(registry.refs(family), key=lambda ref: ref.name):
        plugin: Any = ref.load() if ref.distribution == OWN else None
        if plugin is not None:
            kinds = ", ".join(f"`{kind}`" if kind else "anything" for kind in sorted(plugin.kinds))
            needs = ", ".join(f"`{need}`" for need in plugin.requires)
            named = " Only where it is named." if plugin.opt_in else ""
            yield f"| `{ref.name}` | {plugin.summary or '-'}.{named} | {kinds or 'any'} | {needs or '-'} |"


def _metrics() -> Iterator[str]:
    from jackfield.metrics import MetricsCollector
    from jackfield.server.operations.prometheus import ServerMetrics

    yield from ("# Metrics", "", NOTE, "")
    yield "`GET /metrics` tells these in the text format of Prometheus. With `--vllm-metric-names` those of the engine"
    yield "come under the prefix `vllm:` too."
    yield from ("", "| name | kind | what it is |", "|---|---|---|")
    for metric in ServerMetrics(MetricsCollector(0).snapshot, "").collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        yield f"| `{name}` | {metric.type} | {metric.documentation} |"
