"""``model.hf_overrides``: what a user says in place of a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with values replaced. Objects are merged, so that what is not named stays; None takes a
    key away. A key with dots leads into objects (``rope_parameters.factor``), unless the configuration has such a key.
    """
    result = dict(config)
    for key, value in overrides.items():
        first, dot, rest = key.partition(".")
        if dot and key not in config:
            key, value = first, {rest: value}
        before = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            result[key] = overridden(before if isinstance(before, Mapping) else {}, value)
        else:
            result[key] = value
    return result
