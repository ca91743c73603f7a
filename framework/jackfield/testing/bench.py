"""A plugin on the bench: where it runs, and what the oracle says of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from jackfield.interfaces import ANY, DeviceFacts, Platform, Plugin, Reason, Request, Settings
from jackfield.oracle.judge import judge
from jackfield.oracle.verdict import Verdict
from jackfield.registry import PluginRef, PluginState, Registry

RAISED = frozenset({"check_raised", "preference_raised", "probe_raised"})
"""Codes of reasons that are no answer but an exception of the plugin."""

Extra = Callable[[Any, Any], Sequence[Reason]]


@dataclass(frozen=True, slots=True)
class Bench:
    """One plugin class, the device that it is tried on, and the facts of that device."""

    ref: PluginRef
    plugin: type[Plugin]
    device: torch.device
    facts: DeviceFacts

    def verdict(self, request: Request, extra: Extra | None = None) -> Verdict:
        """Return what the oracle says of the plugin for a request on the bench's device."""
        return judge(self.ref, replace(request, device=self.facts), extra=extra)

    def accepts(self, request: Request, extra: Extra | None = None) -> bool:
        """Return whether the plugin takes a request. A refusal must have reasons, each with a code and a text."""
        verdict = self.verdict(request, extra)
        if verdict.accepted:
            return True
        check_reasons(verdict)
        return False

    def settings(self) -> Settings:
        """Return the plugin's options as declared."""
        return Settings({name: option.default for name, option in self.plugin.options.items()})


def check_reasons(verdict: Verdict) -> None:
    """Fail unless a refusal says why."""
    assert verdict.reasons, f"{verdict.name} refuses at '{verdict.stage}' without a reason"
    for reason in verdict.reasons:
        assert reason.code and reason.detail, f"{verdict.name} gives an empty reason: {reason}"
        assert reason.code not in RAISED, f"{verdict.name} does not answer: {reason.detail}"


@cache
def installed() -> Registry:
    """Return the installed plugins; looked up once."""
    return Registry.discover()


def find_ref(plugin: type[Plugin]) -> PluginRef | None:
    """Return the installed plugin whose class this is, or None."""
    for ref in installed().refs(plugin.family):
        if ref.name == plugin.name and ref.state is not PluginState.FAILED and ref.load() is plugin:
            return ref
    return None


@cache
def siblings(ref: PluginRef) -> tuple[PluginRef, ...]:
    """Return the plugins of the same owner and family that load."""
    refs = installed().refs(ref.family)
    return tuple(other for other in refs if other.distribution == ref.distribution and other.load_object() is not None)


def in_process_ref(plugin: type[Plugin]) -> PluginRef:
    """Return a ref for a class that no distribution declares."""
    return Registry().register(plugin)


def device_for(plugin: type[Plugin]) -> torch.device | None:
    """Return the device that a plugin is tried on: the processor where it runs there, else the machine's accelerator
    if it is one of the plugin's, else None.
    """
    types = plugin.device_types
    if types >= ANY or "cpu" in types:
        return torch.device("cpu")
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        if found is not None and found.type in types:
            return torch.device(found.type, 0)
    return None


@cache
def facts_of(device: torch.device) -> DeviceFacts:
    """Return what the installed platform of that device says of it."""
    for ref in installed().refs("platforms"):
        platform = ref.load()
        if platform is not None and issubclass(platform, Platform) and platform.device_type == device.type:
            return platform.facts(device.index or 0)
    return DeviceFacts(device.type)
