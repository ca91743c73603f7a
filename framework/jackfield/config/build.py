"""From settings to a validated, frozen configuration; pydantic's errors become problems with origins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from jackfield.config import schema
from jackfield.config.engine import EngineConfig
from jackfield.config.origin import DEFAULT, Origin, Path, Problem, Setting, raise_problems
from jackfield.config.values import type_words


def build(settings: Iterable[Setting]) -> EngineConfig:
    """Return the configuration in which later settings win over earlier ones.

    Raises:
        ConfigError: values are wrong; all of them are listed.
    """
    final = {setting.path: setting for setting in settings}
    data: dict[str, Any] = {}
    for setting in final.values():
        put(data, setting.path, setting.value)
    return validate(data, {setting.name: setting.origin for setting in final.values()})


def validate(data: Mapping[str, Any], origins: Mapping[str, Origin]) -> EngineConfig:
    """Return the configuration with these values and origins.

    Raises:
        ConfigError: values are wrong; all of them are listed.
    """
    try:
        config = EngineConfig.model_validate(data)
    except ValidationError as error:
        raise_problems(_problems(error, origins))
        raise
    config.adopt(origins)
    return config


def put(data: dict[str, Any], path: Path, value: Any) -> None:
    """Set a value in nested dicts, making those that are missing."""
    for name in path[:-1]:
        data = data.setdefault(name, {})
    data[path[-1]] = value


def _problems(error: ValidationError, origins: Mapping[str, Origin]) -> list[Problem]:
    found: dict[str, Problem] = {}
    for entry in error.errors(include_url=False):
        tokens = tuple(str(part) for part in entry["loc"])
        name = _field(tokens, origins)
        text = entry["msg"].removeprefix("Value error, ")
        message = f"{name} cannot be {entry['input']!r}: {text[:1].lower()}{text[1:]}"
        remedy = _remedy(tuple(name.split(".")))
        found.setdefault(name, Problem(name, message, entry["input"], remedy, origins.get(name, DEFAULT)))
    return list(found.values())


def _field(tokens: Path, origins: Mapping[str, Origin]) -> str:
    for end in range(len(tokens), 0, -1):
        if ".".join(tokens[:end]) in origins:
            return ".".join(tokens[:end])
    while tokens and schema.annotation_at(tokens) is None:
        tokens = tokens[:-1]
    return ".".join(tokens)


def _remedy(path: Path) -> str:
    annotation = schema.annotation_at(path)
    return "" if annotation is None else f"give: {type_words(annotation)}"
