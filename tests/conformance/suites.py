"""Conformance classes for the project's own plugins, without writing each of them out."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield.interfaces import Plugin
from jackfield.testing import PluginConformance
from jackfield.testing.bench import device_for


def suite(base: type[PluginConformance], plugin: type[Plugin], **attributes: Any) -> type[PluginConformance]:
    """Return what an author writes: a subclass with the fixture ``plugin``. Of a plugin that runs on no device of this
    machine only what needs none is tested; the rest is skipped once, with the reason.
    """

    def fixture(self: object) -> type[Plugin]:
        return plugin

    if device_for(plugin) is None:
        base, attributes = PluginConformance, {"family": plugin.family}
    return type(f"Test{plugin.__name__}", (base,), {"plugin": pytest.fixture(name="plugin")(fixture), **attributes})
