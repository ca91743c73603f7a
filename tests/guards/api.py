"""The public plugin API as data. ``python tests/guards/api.py`` writes the snapshot after a deliberate change.

Before that, raise the version in ``jackfield/interfaces/families.py`` of each family that changed: the minor for
additions, the major for anything that breaks a plugin.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from enum import Enum
from pathlib import Path
from typing import Any

from jackfield import interfaces
from jackfield.interfaces import FAMILIES
from jackfield.interfaces.hooks import Hooks

SNAPSHOT = Path(__file__).with_name("api_snapshot.json")


def snapshot() -> dict[str, Any]:
    """Return versions and signatures of everything public in ``jackfield.interfaces``."""
    names: list[tuple[str, Any]] = [(name, getattr(interfaces, name)) for name in interfaces.__all__]
    return {
        "versions": {name: list(family.version) for name, family in FAMILIES.items()},
        "api": {name: describe(thing) for name, thing in [*names, ("Hooks", Hooks)]},
    }


def describe(thing: Any) -> dict[str, Any]:
    """Return one name as data."""
    if inspect.isclass(thing):
        return _describe_class(thing)
    if inspect.isfunction(thing):
        return {"signature": str(inspect.signature(thing))}
    return {"type": type(thing).__name__, "value": _value(thing)}


def _value(thing: Any) -> Any:
    if isinstance(thing, frozenset):
        return sorted(thing)
    return sorted(thing) if isinstance(thing, dict) else repr(thing) if isinstance(thing, str | int) else None


def _describe_class(cls: type) -> dict[str, Any]:
    if issubclass(cls, Enum):
        return {"members": {member.name: member.value for member in cls}}
    about: dict[str, Any] = {"bases": [base.__name__ for base in cls.__bases__ if base is not object]}
    if dataclasses.is_dataclass(cls):
        about["fields"] = {f.name: f"{f.type}{_default(f)}" for f in dataclasses.fields(cls)}
    else:
        about["attributes"] = dict(sorted(_annotations(cls).items()))
    about["methods"] = {name: text for name, part in sorted(vars(cls).items()) if (text := _method(name, part))}
    return about


def _annotations(cls: type) -> dict[str, str]:
    return {name: str(kind) for name, kind in inspect.get_annotations(cls).items() if not name.startswith("_")}


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {field.default!r}"
    return " = ..." if field.default_factory is not dataclasses.MISSING else ""


def _method(name: str, part: Any) -> str:
    if name.startswith("_") and name not in ("__getitem__", "__call__"):
        return ""
    if isinstance(part, property):
        assert part.fget is not None
        return f"property{inspect.signature(part.fget)}"
    function = part.__func__ if isinstance(part, classmethod | staticmethod) else part
    if not inspect.isfunction(function):
        return ""
    kind = type(part).__name__ + " " if function is not part else ""
    abstract = "abstract " if getattr(function, "__isabstractmethod__", False) else ""
    return f"{abstract}{kind}{inspect.signature(function)}"


def text() -> str:
    """Return the snapshot as it is stored."""
    return json.dumps(snapshot(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    SNAPSHOT.write_text(text(), encoding="utf-8")
