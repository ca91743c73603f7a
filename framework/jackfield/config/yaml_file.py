"""Configuration files: YAML, with the line of every value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from jackfield.config.origin import Given, Origin, Problem
from jackfield.errors import ConfigError


def read_yaml(path: Path) -> tuple[dict[str, Given], list[Problem]]:
    """Return the values of a file under their names, and the keys that occur twice.

    Raises:
        ConfigError: the file is missing, is not YAML, or does not hold a map.
    """
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        return _File(path, loader).read(node) if node is not None else ({}, [])
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration file: {error.strerror}",
            field="config",
            value=str(path),
            remedy="name an existing YAML file with --config or JACKFIELD_CONFIG",
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not YAML: {' '.join(str(error).split())}",
            field="config",
            value=str(path),
            remedy="write settings as NAME: VALUE",
        ) from error


class _File:
    def __init__(self, path: Path, loader: yaml.SafeLoader) -> None:
        self._path = path
        self._loader = loader
        self._problems: list[Problem] = []

    def read(self, node: yaml.Node) -> tuple[dict[str, Given], list[Problem]]:
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                f"{self._path} must hold a map of settings", field="config", value=str(self._path), remedy="name: value"
            )
        return self._map(node), self._problems

    def _origin(self, node: yaml.Node) -> Origin:
        return Origin("file", f"{self._path}:{node.start_mark.line + 1}")

    def _map(self, node: yaml.MappingNode) -> dict[str, Given]:
        self._note_duplicates(node)
        self._loader.flatten_mapping(node)
        return {str(self._plain(key)): Given(self._value(part), self._origin(key)) for key, part in node.value}

    def _note_duplicates(self, node: yaml.MappingNode) -> None:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                message, remedy = f"'{name}' occurs twice in one map", "keep one of them"
                self._problems.append(Problem(name, message, remedy=remedy, origin=self._origin(key)))
            seen.add(name)

    def _value(self, node: yaml.Node) -> Any:
        return self._map(node) if isinstance(node, yaml.MappingNode) else self._plain(node)

    def _plain(self, node: yaml.Node) -> Any:
        return self._loader.construct_object(node, deep=True)
