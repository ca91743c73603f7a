"""Conformance of listeners: they load, take only arguments that events have, and cost nothing when nobody is heard."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest

from jackfield.interfaces import HOOK_GROUP
from jackfield.registry import HookBus, Manifest, PluginRef, Registry
from jackfield.registry.hooks import validate_hooks
from jackfield.testing.child import HEAVY, Told, ask


class HooksConformance:
    """Write the fixture ``listener``: the object, class or module that the entry point names; and its ``name``."""

    name: ClassVar[str] = ""
    """Of the entry point in the group ``jackfield.hooks``."""

    @pytest.fixture
    def listener(self) -> Any:
        """What the entry point names; written by the author."""
        pytest.fail(f"write a fixture 'listener' in {type(self).__name__}")

    @pytest.fixture
    def ref(self) -> PluginRef:
        """The plugin as the registry knows it."""
        found = [ref for ref in Registry.discover().refs("hooks") if ref.name == self.name]
        assert found, f"no installed distribution declares '{self.name}' in the group \"{HOOK_GROUP}\""
        return found[0]

    @pytest.fixture
    def told(self, ref: PluginRef) -> Told:
        """What a fresh process says of it."""
        return ask(json.dumps(Manifest.of([ref]).to_dict()), HEAVY)

    def test_it_is_a_listener(self, listener: Any) -> None:
        """Its events exist and have the arguments that it takes."""
        bus = HookBus()
        bus.add(validate_hooks(listener), "kit")
        assert bus.listeners(), "it listens to no event: mark methods with jackfield.interfaces.hookimpl"

    def test_its_entry_point_loads(self, ref: PluginRef) -> None:
        """An installed distribution declares it."""
        assert ref.load_object() is not None, ref.sentence()

    def test_another_process_finds_it_and_loading_is_light(self, told: Told) -> None:
        """A spawned process loads it; that imports no torch and changes nothing."""
        assert told.error == ""
        assert told.heavy == () and not told.changed
