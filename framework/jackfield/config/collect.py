"""From what one source says to settings: names are looked up, short forms are written out, texts become values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jackfield.config import renamed, schema
from jackfield.config.origin import Given, Path, Problem, Setting, given
from jackfield.config.schema import Kind
from jackfield.config.selection import Selection
from jackfield.config.tree import ConfigTree
from jackfield.config.values import coerce, type_words


def lookup(name: str) -> Path | Problem:
    """Return the path of a name as users write it: a section, a short name, a name of another engine that means the
    same, or a dotted name.
    """
    key = name if "." in name else name.replace("-", "_")
    if key in ConfigTree.model_fields:
        return (key,)
    known = renamed.table().get(key)
    if known is not None:
        return schema.parse(known.to) if known.same else known.problem()
    head, _, rest = key.partition(".")
    flat = schema.flat_names().get(head.replace("-", "_"))
    if flat is None or head in ConfigTree.model_fields:
        return schema.parse(key)
    return schema.parse(rest, flat) if rest else flat


@dataclass(slots=True)
class Collector:
    """Collects the settings and the problems of one source."""

    settings: dict[Path, Setting] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add_all(self, values: Mapping[str, Given]) -> None:
        """Add values under names as users write them."""
        for name, value in values.items():
            self._add_named(lookup(name), value)

    def _add_named(self, path: Path | Problem, value: Given) -> None:
        if isinstance(path, Problem):
            shown = path.value if path.value is not None else value.plain()
            self.problems.append(replace(path, value=shown, origin=value.origin))
        else:
            self.add(path, value)

    def add(self, path: Path, value: Given) -> None:
        """Add a value at a place of the tree; maps are taken apart."""
        annotation = schema.annotation_at(path)
        kind = schema.kind_of(annotation)
        value = _from_json(kind, value)
        if kind is Kind.LEAF:
            self._add_leaf(path, annotation, value)
        elif isinstance(value.value, Mapping):
            self._add_map(path, kind, value.value)
        elif value.value is not None:
            self._add_short(path, annotation, value)

    def _add_map(self, path: Path, kind: Kind, parts: Mapping[str, Given]) -> None:
        for key, part in parts.items():
            self._add_named(self._below(path, key) if kind is Kind.SECTION else (*path, key), part)

    @staticmethod
    def _below(path: Path, key: str) -> Path | Problem:
        known = renamed.table().get(key)
        if known is not None and "." not in key and schema.child(schema.annotation_at(path), key) is None:
            return schema.parse(known.to) if known.same else known.problem()
        return schema.parse(key, path)

    def _add_short(self, path: Path, annotation: Any, value: Given) -> None:
        if annotation is Selection:
            self.add((*path, "force"), value)
        elif path == ("model",):
            self.add(("model", "model"), value)
        else:
            name = ".".join(path)
            message = f"'{name}' takes a map of names to values, not {value.value!r}"
            self.problems.append(Problem(name, message, value.value, origin=value.origin))

    def _add_leaf(self, path: Path, annotation: Any, value: Given) -> None:
        name = ".".join(path)
        try:
            plain = coerce(value.plain(), annotation, from_text=value.origin.source in ("cli", "env"))
        except ValueError as error:
            remedy = f"give: {type_words(annotation)}"
            message = f"{name} cannot be {value.plain()!r}: {error}"
            self.problems.append(Problem(name, message, value.plain(), remedy, value.origin))
            return
        earlier = self.settings.get(path)
        if earlier is not None and earlier.value != plain:
            message = f"{name} is set twice, to {earlier.value!r} ({earlier.origin}) and to {plain!r}"
            self.problems.append(Problem(name, message, plain, "keep one of them", value.origin))
        self.settings[path] = Setting(path, plain, value.origin)


def _from_json(kind: Kind, value: Given) -> Given:
    if kind is Kind.LEAF or not isinstance(value.value, str) or not value.value.lstrip().startswith("{"):
        return value
    try:
        return given(json.loads(value.value), value.origin)
    except ValueError:
        return value
