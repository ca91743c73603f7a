"""Options of one plugin, checked against the schema that it declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jackfield.errors import ConfigError, did_you_mean
from jackfield.interfaces import Option, Settings


def resolve_options(
    name: str, schema: Mapping[str, Option], user: Mapping[str, Any], *, field: str = "plugins.options.{name}.{key}"
) -> Settings:
    """Return declared defaults overlaid with what the user set. ``field`` is how users spell an option.

    Raises:
        ConfigError: an option is unknown, or its value has the wrong type or is not among the choices; all offenders
            are listed.
    """
    values: dict[str, Any] = {key: option.default for key, option in schema.items()}
    faults: list[tuple[str, str, str]] = []
    for key, value in user.items():
        if key not in schema:
            known = f"options: {', '.join(sorted(schema)) or 'none'}"
            faults.append(
                (key, f"plugin '{name}' has no option '{key}'", f"{did_you_mean(key, schema)} {known}".strip())
            )
        elif fault := _fault(schema[key], value):
            faults.append((key, f"option '{key}' of plugin '{name}' {fault}", schema[key].help))
        else:
            values[key] = float(value) if schema[key].type is float else value
    if faults:
        key = faults[0][0]
        raise ConfigError(
            "; ".join(message for _, message, _ in faults),
            field=field.format(name=name, key=key),
            value=user[key],
            remedy="; ".join(remedy for _, _, remedy in faults if remedy),
        )
    return Settings(values)


def _fault(option: Option, value: object) -> str:
    accepted = (int, float) if option.type is float else (option.type,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and option.type is not bool):
        return f"must be of type {option.type.__name__}, not {type(value).__name__}"
    if option.choices and value not in option.choices:
        return f"must be one of {', '.join(map(repr, option.choices))}"
    return ""
