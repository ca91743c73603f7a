"""Plugins of a family's previous major version: adapted where there is an adapter, refused where there is none.

An adapter makes a class of today's interface out of what an entry point of the old group resolves to. It is looked up
by family and old major version; which version a plugin is for is known from its entry-point group alone. Each use is
told once, with the plugin and its owner, so that people know whom to ask for a newer version.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from functools import partial

from jackfield.interfaces import Family, Plugin
from jackfield.registry.codes import LOAD_FAILED
from jackfield.registry.ref import PluginRef, RefusedError
from jackfield.registry.validation import validate_plugin

Adapter = Callable[[object], type[Plugin]]
"""From what an old entry point names to a class of the current interface. May raise: the plugin is then FAILED."""
Adapters = Mapping[tuple[str, int], Adapter]
"""By family and major version."""

ADAPTERS: Adapters = {}
"""Of this core. All families are at their first major version, so there is nothing to adapt yet."""

_logger = logging.getLogger("jackfield.plugins")


def adapted(adapter: Adapter, family: Family, ref: PluginRef, major: int) -> Callable[[object], type[Plugin]]:
    """Return what turns the object of ``ref``'s entry point into a class of today."""
    return partial(_adapt, adapter, family, ref, major)


def _adapt(adapter: Adapter, family: Family, ref: PluginRef, major: int, found: object) -> type[Plugin]:
    try:
        made = adapter(found)
    except Exception as error:
        message = f"it is for {family.name} API {major} and cannot be adapted: {type(error).__name__}: {error}"
        raise RefusedError(
            LOAD_FAILED, "class", message, "install a version of the plugin made for this core"
        ) from error
    plugin = validate_plugin(made, family, ref.name)
    text = (
        f"plugin {ref.name} ({ref.owner}) is written for {family.name} API {major} and is adapted to "
        f"{family.version[0]}.{family.version[1]}; ask its owner for a newer one: adapters last for one major version"
    )
    _logger.warning(text)
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return plugin
