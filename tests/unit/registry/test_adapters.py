"""Plugins of a previous major version: a fake one, with an adapter, without one, and with one that fails."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fakes import Site, attention_class

from jackfield.errors import PluginError
from jackfield.registry import Manifest, PluginState, Registry

OLD_GROUP = "jackfield.attention_backends.v0"
OLD = """
def describe():
    return {"title": "rocket", "layers": ["full"]}
"""


def adapter(found: Any) -> Any:
    """Interfaces of version 0 were functions that return a description."""
    told = found()
    return attention_class(told["title"], kinds=frozenset(told["layers"]), summary="adapted")


ADAPTERS = {("attention_backends", 0): adapter}


@pytest.fixture
def old(site: Site) -> Site:
    site.add("acme", {OLD_GROUP: {"rocket": "fake_old:describe"}}, {"fake_old": OLD}, version="0.4")
    return site


def test_without_an_adapter_it_is_refused_unread(old: Site) -> None:
    (ref,) = Registry.discover(entry_points=old.points()).refs()
    assert ref.load() is None and old.imported() == []
    assert ref.error is not None and ref.error.code == "api_version"


def test_with_one_it_is_a_plugin_like_any_other(old: Site, caplog: pytest.LogCaptureFixture) -> None:
    (ref,) = Registry.discover(entry_points=old.points(), adapters=ADAPTERS).refs()
    assert ref.state is PluginState.DISCOVERED and old.imported() == []
    with caplog.at_level(logging.WARNING), pytest.warns(DeprecationWarning) as warned:
        plugin = ref.require()
    assert plugin.kinds == {"full"} and ref.load() is plugin
    (text,) = {str(warning.message) for warning in warned}
    assert text.startswith("plugin rocket (acme 0.4) is written for attention_backends API 0 and is adapted to 1.")
    assert [record.getMessage() for record in caplog.records] == [text], "it is told once"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_workers_adapt_it_too(old: Site) -> None:
    (ref,) = Registry.discover(entry_points=old.points(), adapters=ADAPTERS).refs()
    manifest = Manifest.of([ref]).to_dict()
    (found,) = Registry.from_manifest(manifest, adapters=ADAPTERS).refs()
    assert found.require().summary == "adapted"
    with pytest.raises(PluginError, match="installed plugins differ from the manifest"):
        Registry.from_manifest(manifest)


def test_an_adapter_that_fails_is_the_plugins_failure(old: Site) -> None:
    def failing(found: object) -> Any:
        raise ValueError("no layers")

    (ref,) = Registry.discover(entry_points=old.points(), adapters={("attention_backends", 0): failing}).refs()
    assert ref.load() is None and ref.error is not None
    assert ref.sentence() == (
        "plugin rocket (acme 0.4) could not be loaded: it is for attention_backends API 0 and cannot be adapted: "
        "ValueError: no layers"
    )
