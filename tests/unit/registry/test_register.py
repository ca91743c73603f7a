"""Registration by a call, for notebooks."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import Site, attention_class

from jackfield.errors import PluginError
from jackfield.interfaces import Plugin
from jackfield.interfaces.families import FAMILIES
from jackfield.registry import IN_PROCESS, Registry

OFFERED = ".".join(map(str, FAMILIES["attention_backends"].version))


def names(registry: Registry) -> list[tuple[str, str]]:
    return [(ref.distribution, str(ref.state)) for ref in registry.refs()]


def test_registered_class_is_a_plugin_like_any_other() -> None:
    registry = Registry()
    rocket = attention_class("rocket")
    ref = registry.register(rocket)
    assert registry.get("attention_backends", "rocket") is ref and ref.require() is rocket
    assert ref.distribution == IN_PROCESS


def test_a_taken_name_is_an_error_unless_overridden(site: Site) -> None:
    site.attention("rocket")
    registry = Registry.discover(entry_points=site.points())
    before = names(registry)
    with pytest.raises(PluginError) as caught:
        registry.register(attention_class("rocket"))
    assert caught.value.message == "attention_backends.rocket is already provided by acme-rocket 1.0"
    assert names(registry) == before
    ref = registry.register(attention_class("rocket"), override=True)
    assert registry.get("attention_backends", "rocket") is ref
    assert names(registry) == [(IN_PROCESS, "loaded"), ("acme-rocket", "disabled")]
    assert site.imported() == []


def test_running_a_cell_again_replaces_the_class() -> None:
    registry = Registry()
    registry.register(attention_class("rocket"))
    again = attention_class("rocket")
    registry.register(again, override=True)
    assert [ref.require() for ref in registry.refs()] == [again]


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (attention_class(""), " has no name"),
        (attention_class("late", api=(1, 99)), f"needs attention_backends API 1.99, this core offers {OFFERED}"),
        (attention_class("odd", kinds="full"), "kinds is 'full', not a set of strings"),
        (Plugin, "is not a plugin class; families: platforms, models"),
        (int, "is not a plugin class; families: platforms, models"),
    ],
)
def test_malformed_classes_change_nothing(plugin: Any, message: str) -> None:
    registry = Registry()
    with pytest.raises(PluginError) as caught:
        registry.register(plugin)
    assert message in caught.value.message
    assert registry.refs() == ()


def test_a_frozen_registry_takes_nothing() -> None:
    registry = Registry()
    registry.freeze()
    with pytest.raises(PluginError, match="an engine was already built from this registry"):
        registry.register(attention_class("rocket"))
    assert registry.frozen and registry.refs() == ()
