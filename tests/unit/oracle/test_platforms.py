"""Platform decisions: probes as reasons, and the rule that a fallback is not taken silently."""

from __future__ import annotations

import pytest
from fakes import PLATFORMS, FakePlatform, Site, platform_class

from jackfield.config.plugins import PluginSettings
from jackfield.config.selection import Selection
from jackfield.errors import PluginError
from jackfield.interfaces import PlatformRequest, Probe
from jackfield.oracle import Decision, decide, guard_fallback, probe_reasons
from jackfield.registry import Registry


class Absent(FakePlatform):
    name = "absent"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(False, "no driver found")


class Exploding(FakePlatform):
    name = "exploding"

    @classmethod
    def probe(cls) -> Probe:
        raise OSError("driver exploded")


GENERIC = platform_class("generic", is_fallback=True)


def choose(registry: Registry, selection: Selection | None = None) -> Decision:
    request = PlatformRequest(kind="devices")
    word = (selection or Selection()).resolve()
    return decide(registry, "platforms", request, word, field="platform", extra=probe_reasons)


def registry_of(*plugins: type[FakePlatform], base: Registry | None = None) -> Registry:
    registry = base or Registry()
    for plugin in plugins:
        registry.register(plugin)
    return registry


def test_probes_are_reasons() -> None:
    decision = choose(registry_of(Absent, Exploding, GENERIC))
    found = {verdict.name: (verdict.stage, verdict.text) for verdict in decision.rejected}
    assert decision.name == "generic"
    assert found == {
        "absent": ("environment", "not_present: no driver found"),
        "exploding": ("environment", "probe_raised: OSError: driver exploded"),
    }


def test_fallback_is_fine_when_others_are_only_absent() -> None:
    registry = registry_of(Absent, GENERIC, platform_class("bare", requires=("no-such-package",)))
    guard_fallback(choose(registry), registry)


def test_fallback_after_a_raising_probe_stops() -> None:
    registry = registry_of(Exploding, GENERIC)
    with pytest.raises(PluginError) as caught:
        guard_fallback(choose(registry), registry)
    assert caught.value.message == (
        "only the fallback platform 'generic' is left, because others failed:\n"
        "  plugin exploding ((in process)): probe_raised: OSError: driver exploded"
    )
    assert caught.value.field == "platform.force"
    assert caught.value.remedy == "fix or disable the failed plugin, or name the fallback: platform.force: generic"


def test_fallback_after_a_failed_import_stops_unless_disabled(site: Site) -> None:
    site.add("acme", {PLATFORMS: {"bad": "fake_bad:World"}}, {"fake_bad": "raise ImportError('libx.so')"})
    registry = registry_of(GENERIC, base=Registry.discover(entry_points=site.points()))
    with pytest.raises(PluginError, match=r"plugin bad \(acme 1.0\) could not be loaded: ImportError: libx.so"):
        guard_fallback(choose(registry), registry)
    disabled = Registry.discover(PluginSettings(disable=("bad",)), site.points())
    guard_fallback(choose(registry_of(GENERIC, base=disabled)), disabled)


@pytest.mark.parametrize("selection", [Selection(force="generic"), Selection(prefer=("generic",))])
def test_a_named_fallback_is_used(selection: Selection) -> None:
    registry = registry_of(Exploding, GENERIC)
    guard_fallback(choose(registry, selection), registry)


def test_a_present_platform_needs_no_guard() -> None:
    registry = registry_of(Exploding, platform_class("real"))
    guard_fallback(choose(registry), registry)
