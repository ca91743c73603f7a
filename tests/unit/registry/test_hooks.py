"""Broadcast events."""

from __future__ import annotations

import logging

import pytest
from fakes import Site

from jackfield.errors import ConfigError
from jackfield.interfaces import HOOK_GROUP, hookimpl
from jackfield.registry import HookBus, PluginState, Registry

GOOD = """
from jackfield.interfaces import hookimpl
heard = []
@hookimpl
def step_finished(stats): heard.append(stats)
"""


class Recorder:
    def __init__(self, log: list[object], error: Exception | None = None) -> None:
        self.log = log
        self.error = error

    @hookimpl
    def request_finished(self, request_id: str) -> None:
        self.log.append(request_id)
        if self.error:
            raise self.error

    @hookimpl
    def register_routes(self, app: object) -> None:
        self.log.append(app)


def hook_rows(site: Site, source: str) -> tuple[HookBus, Registry]:
    site.add("acme", {HOOK_GROUP: {"audit": "fake_hooks"}}, {"fake_hooks": source})
    registry = Registry.discover(entry_points=site.points())
    bus = HookBus()
    bus.load(registry.refs("hooks"))
    return bus, registry


def test_module_listens_through_an_entry_point(site: Site) -> None:
    bus, registry = hook_rows(site, GOOD)
    bus.emit("step_finished", stats=7)
    bus.emit("engine_started", engine=None)
    import fake_hooks  # type: ignore[import-not-found]

    assert fake_hooks.heard == [7]
    assert bus.listeners() == {"step_finished": ("audit",)}
    assert registry.refs()[0].state is PluginState.LOADED


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        (GOOD.replace("stats)", "stat)", 1), "available arguments: step_finished(stats)"),
        (
            GOOD.replace("step_finished", "step_finish"),
            "there is no event 'step_finish'; events: engine_config_resolved, decision_made",
        ),
        (GOOD.replace("@hookimpl", "@hookimpl(wrapper=True)").replace("heard.append(stats)", "yield"), "is a wrapper"),
    ],
)
def test_bad_hook_plugins_are_failed_rows(site: Site, source: str, text: str) -> None:
    bus, registry = hook_rows(site, source)
    (row,) = registry.rows()
    assert (row.family, row.name, row.state, row.code) == ("hooks", "audit", "failed", "load_failed")
    assert text in row.reason and row.reason.startswith("plugin audit (acme 1.0) could not be loaded: ")
    assert bus.listeners() == {}
    bus.emit("step_finished", stats=1)


def test_listener_that_raises_is_logged_once_and_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    bad: list[object] = []
    good: list[object] = []
    bus = HookBus()
    bus.add(Recorder(bad, ValueError("boom")), "bad")
    bus.add(Recorder(good), "good")
    with caplog.at_level(logging.ERROR, "jackfield.hooks"):
        for name in ("a", "b"):
            bus.emit("request_finished", request_id=name, finish_reason="stop", stats=None)
    assert (bad, good) == (["a"], ["a", "b"])
    assert [record.getMessage() for record in caplog.records] == [
        "hook plugin bad ((in process)) raised in request_finished and is switched off"
    ]
    assert bus.listeners()["request_finished"] == ("good",)


def test_routes_are_registered_only_for_named_plugins() -> None:
    log: list[object] = []
    other: list[object] = []
    bus = HookBus()
    bus.add(Recorder(log), "audit")
    bus.add(Recorder(other), "other")
    bus.register_routes("app", ())
    assert log == [] and other == []
    bus.register_routes("app", ("audit",))
    assert log == ["app"] and other == []
    with pytest.raises(ConfigError) as caught:
        bus.register_routes("app", ("audti",))
    assert "did you mean 'audit'" in caught.value.remedy


def test_disabled_hooks_are_not_imported(site: Site) -> None:
    from jackfield.config.plugins import PluginSettings

    site.add("acme", {HOOK_GROUP: {"audit": "fake_hooks"}}, {"fake_hooks": GOOD})
    registry = Registry.discover(PluginSettings(disable=("hooks.audit",)), site.points())
    bus = HookBus()
    bus.load(registry.refs("hooks"))
    assert bus.listeners() == {} and site.imported() == []


def test_class_is_instantiated(site: Site) -> None:
    source = GOOD.replace("@hookimpl\ndef step_finished(stats): heard.append(stats)", "")
    source += "class Audit:\n    @hookimpl\n    def engine_started(self, engine): heard.append((type(self), engine))\n"
    site.add("acme", {HOOK_GROUP: {"audit": "fake_class:Audit"}}, {"fake_class": source})
    bus = HookBus()
    bus.load(Registry.discover(entry_points=site.points()).refs("hooks"))
    bus.emit("engine_started", engine="e")
    import fake_class  # type: ignore[import-not-found]

    assert fake_class.heard == [(fake_class.Audit, "e")]
