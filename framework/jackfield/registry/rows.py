"""One row of ``jackfield plugins`` for each plugin."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jackfield.interfaces import Platform, Plugin
from jackfield.registry.codes import NOT_PRESENT, PROBE_RAISED
from jackfield.registry.ref import PluginRef


@dataclass(frozen=True, slots=True)
class PluginRow:
    """A plugin as the command line shows it.

    Args:
        family, name, distribution, version: which plugin. state: a value of PluginState.
        api: ``1.0``, or ``""`` when the class could not be loaded.
        code: reason code when something is wrong, else ``""``. reason: the same in words.
        summary: the plugin's own line.
    """

    family: str
    name: str
    distribution: str
    version: str
    state: str
    api: str
    code: str
    reason: str
    summary: str

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able data."""
        return asdict(self)


def plugin_row(ref: PluginRef) -> PluginRow:
    """Return the row of one plugin; loads it, and never raises for it."""
    plugin = ref.load()
    found = ref.load_object()
    code, reason = _fault(ref, plugin)
    if plugin is None:
        api, summary = "", (getattr(found, "__doc__", None) or "").strip().partition("\n")[0]
    else:
        api, summary = "{}.{}".format(*plugin.api), plugin.summary
    return PluginRow(ref.family, ref.name, ref.distribution, ref.version, str(ref.state), api, code, reason, summary)


def _fault(ref: PluginRef, plugin: type[Plugin] | None) -> tuple[str, str]:
    if ref.error is not None:
        return ref.error.code, ref.sentence()
    if missing := ref.missing():
        return missing[0].code, "; ".join(f"{reason.detail} ({reason.remedy})" for reason in missing)
    if plugin is not None and issubclass(plugin, Platform):
        return _presence(ref, plugin)
    return "", ""


def _presence(ref: PluginRef, platform: type[Platform]) -> tuple[str, str]:
    try:
        probe = platform.probe()
        return ("", probe.detail) if probe.present else (NOT_PRESENT, probe.detail)
    except Exception as error:
        ref.record_fault(error, PROBE_RAISED, "probe")
        return PROBE_RAISED, f"probe raised {ref.faults['probe'].text}"
