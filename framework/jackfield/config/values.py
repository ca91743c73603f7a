"""Turning what people write into what fields take."""

from __future__ import annotations

import json
import re
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_UNITS = {"": 0, "b": 0, "k": 1, "kb": 1, "kib": 1, "m": 2, "mb": 2, "mib": 2}
_UNITS |= {"g": 3, "gb": 3, "gib": 3, "t": 4, "tb": 4, "tib": 4}


def parse_bytes(value: object) -> object:
    """Return a number of bytes from ``4GiB``, ``512 MB`` or ``1000``; other types are left to the field's own check.

    ``KiB`` and ``k`` count in 1024, ``KB`` in 1000.

    Raises:
        ValueError: the text is no size.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
    unit = match.group(2).lower() if match else "?"
    if match is None or unit not in _UNITS:
        raise ValueError("a size is a number of bytes or a text such as '512MiB' or '4GiB'")
    base = 1000 if len(unit) == 2 else 1024
    return int(float(match.group(1)) * base ** _UNITS[unit])


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of an annotation, without ``Annotated`` around them."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(inner for part in get_args(annotation) for inner in members(part))
    return (annotation,)


def is_tuple(annotation: Any) -> bool:
    """Return whether a field takes several values."""
    return any(get_origin(part) is tuple for part in members(annotation))


def is_bool(annotation: Any) -> bool:
    """Return whether a field is a yes-or-no question, with or without "not set"."""
    return bool in members(annotation)


def type_words(annotation: Any) -> str:
    """Return what a field takes, in words for help texts."""
    words = [_word(part) for part in members(annotation) if part is not NoneType]
    return " or ".join(dict.fromkeys(words))


def _word(part: Any) -> str:
    if get_origin(part) is Literal:
        return " | ".join(str(choice) for choice in get_args(part))
    if get_origin(part) is tuple:
        return "names, separated by commas"
    if get_origin(part) is dict or part is dict:
        return "map (JSON)"
    names = {bool: "true or false", int: "integer", float: "number", str: "text"}
    return names.get(part, "any value")


def coerce(value: Any, annotation: Any, *, from_text: bool) -> Any:
    """Return ``value`` in the form that pydantic accepts for ``annotation``.

    Args:
        value: what was given.
        annotation: of the field.
        from_text: whether the source knows only text (command line, environment), so that types must be guessed
            where the field takes anything.

    Raises:
        ValueError: a truth value was given for a number.
    """
    parts = members(annotation)
    if isinstance(value, bool) and bool not in parts and (int in parts or float in parts):
        raise ValueError("a number is needed, not true or false")
    if not isinstance(value, str):
        return value
    if NoneType in parts and value.lower() in ("none", "null"):
        return None
    if is_tuple(annotation):
        return [part.strip() for part in value.split(",") if part.strip()]
    return guess(value) if from_text and annotation is Any else value


def guess(text: str) -> Any:
    """Return the JSON value that ``text`` is, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
