"""The configuration tree as data: names, kinds of nodes, and the way from a written name to a field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jackfield.config.origin import Path, Problem
from jackfield.config.selection import Selection
from jackfield.config.tree import ConfigTree
from jackfield.errors import did_you_mean

_FLAT_SECTIONS = ("model", "cache", "scheduler", "parallel", "server")
_FLAT_EXTRA: dict[str, Path] = {
    "num_speculative_tokens": ("speculative", "num_speculative_tokens"),
    "logits_processors": ("sampling", "logits_processors"),
    "log_level": ("log", "level"),
}


class Kind(Enum):
    """What a node of the tree is."""

    SECTION = "section"
    SELECTIONS = "selections"
    """A map from names to selections."""
    MAPS = "maps"
    """A map from names to open maps."""
    OPEN = "open"
    """A map with free keys."""
    LEAF = "leaf"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One field that holds a value.

    Args:
        path: its place. flat: its short name, or ``""``. annotation: its type. help: its docstring. default: its value
            when nobody sets it.
    """

    path: Path
    flat: str
    annotation: Any
    help: str
    default: Any


def kind_of(annotation: Any) -> Kind:
    """Return what a node with this annotation is."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Kind.SECTION
    if get_origin(annotation) is not dict:
        return Kind.LEAF
    value = get_args(annotation)[1]
    if value is Selection:
        return Kind.SELECTIONS
    return Kind.MAPS if get_origin(value) is dict else Kind.OPEN


def is_secret(info: FieldInfo) -> bool:
    """Return whether a field's value must not be shown."""
    return isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("secret") is True


def child(annotation: Any, name: str) -> Any | None:
    """Return the annotation of one part of a node, or None when it has no such part."""
    match kind_of(annotation):
        case Kind.SECTION:
            info = annotation.model_fields.get(name)
            return None if info is None else info.annotation
        case Kind.LEAF:
            return None
        case _:
            return get_args(annotation)[1]


def annotation_at(path: Path) -> Any | None:
    """Return the annotation of a node, or None when there is no such node."""
    annotation: Any = ConfigTree
    for name in path:
        annotation = child(annotation, name)
        if annotation is None:
            return None
    return annotation


@cache
def flat_names() -> dict[str, Path]:
    """Return the short names: fields that can be written without their section."""
    names = {name: (section, name) for section in _FLAT_SECTIONS for name in _fields((section,))}
    return {**names, **_FLAT_EXTRA}


def leaves() -> Iterator[Leaf]:
    """Yield all fields in the tree's order; of nested selections only their maps."""
    flat = {path: name for name, path in flat_names().items()}
    for section, info in ConfigTree.model_fields.items():
        if kind_of(info.annotation) is not Kind.SECTION:
            yield _leaf((section,), "", info)
            continue
        for name, part in _fields((section,)).items():
            yield _leaf((section, name), flat.get((section, name), ""), part)


def _leaf(path: Path, flat: str, info: FieldInfo) -> Leaf:
    default = info.get_default(call_default_factory=True, validated_data={})
    text = " ".join((info.description or "").split())
    return Leaf(path, flat, info.annotation, text, default)


def _fields(path: Path) -> dict[str, FieldInfo]:
    annotation = annotation_at(path)
    if annotation is None or kind_of(annotation) is not Kind.SECTION:
        return {}
    fields: dict[str, FieldInfo] = annotation.model_fields
    return fields


def parse(dotted: str, start: Path = ()) -> Path | Problem:
    """Return the path that a dotted name means, read below ``start``, or the problem with it.

    Layer patterns may contain dots: below ``layers`` everything up to a final ``force``, ``prefer`` or ``exclude`` is
    the pattern, unless it begins with an index or a range.
    """
    path, tokens = start, dotted.split(".")
    while tokens:
        annotation = annotation_at(path)
        kind = kind_of(annotation)
        if kind is Kind.LEAF:
            if annotation is Any:
                return (*path[:-1], ".".join((path[-1], *tokens)))
            return Problem(dotted, f"'{'.'.join(path)}' holds one value and has no part '{'.'.join(tokens)}'")
        key, tokens = _take(kind, path, tokens)
        if kind is Kind.SECTION and key not in annotation.model_fields:  # type: ignore[union-attr]
            key = key.replace("-", "_")
        if child(annotation, key) is None:
            return unknown(key, path)
        path = (*path, key)
    return path


def _take(kind: Kind, path: Path, tokens: list[str]) -> tuple[str, list[str]]:
    if kind is Kind.OPEN:
        return ".".join(tokens), []
    if kind is not Kind.SELECTIONS or path[-1] != "layers" or tokens[0].replace("-", "").isdecimal():
        return tokens[0], tokens[1:]
    end = len(tokens) - 1 if len(tokens) > 1 and tokens[-1] in ("force", "prefer", "exclude") else len(tokens)
    return ".".join(tokens[:end]), tokens[end:]


def unknown(name: str, path: Path) -> Problem:
    """Return the problem of a name that its section does not have."""
    known = list(_fields(path))
    if not path:
        everything = sorted({*known, *flat_names()})
        remedy = did_you_mean(name, everything) or f"sections: {', '.join(known)}"
        return Problem(name, f"there is no setting '{name}'", remedy=remedy)
    section = ".".join(path)
    guess = did_you_mean(name, known) or _elsewhere(name)
    remedy = f"{guess} settings of '{section}': {', '.join(known)}".strip()
    return Problem(f"{section}.{name}", f"'{section}' has no setting '{name}'", remedy=remedy)


def _elsewhere(name: str) -> str:
    path = flat_names().get(name)
    return f"did you mean '{'.'.join(path)}'?" if path else ""
