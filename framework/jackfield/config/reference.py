"""The configuration as text: rows for people, and the reference page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from jackfield.config import renamed, schema
from jackfield.config.engine import EngineConfig
from jackfield.config.environment import variable_name
from jackfield.config.origin import Path
from jackfield.config.tree import ConfigTree
from jackfield.config.values import type_words

_MASK = "***"
"""Shown instead of secrets."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of ``jackfield config show``: dotted name, value, and origin (``""`` when not asked for)."""

    field: str
    value: Any
    origin: str = ""


def show(config: EngineConfig, origin: bool = True) -> list[Row]:
    """Return all values in the tree's order; empty parts of nested selections are left out."""
    return [
        Row(".".join(path), value, str(config.origin(".".join(path))) if origin else "")
        for path, value in _values(config, ())
    ]


def _values(node: BaseModel, path: Path) -> Iterator[tuple[Path, Any]]:
    for name, info in type(node).model_fields.items():
        value = getattr(node, name)
        if isinstance(value, BaseModel):
            yield from _values(value, (*path, name))
        elif schema.kind_of(info.annotation) is schema.Kind.LEAF:
            if (value is not None and value != ()) or len(path) < 2:
                yield (*path, name), _MASK if value and schema.is_secret(info) else value
        else:
            yield from _map_values(value, (*path, name))


def _map_values(values: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, Any]]:
    for key, value in values.items():
        if isinstance(value, BaseModel):
            yield from _values(value, (*path, key))
        elif path == ("plugins", "options"):
            yield from (((*path, key, name), part) for name, part in value.items())
        else:
            yield (*path, key), value


def render_reference() -> str:
    """Return docs/reference/config.md."""
    lines = [
        "# Settings",
        "",
        "<!-- Made by `make docs-config`; do not edit. -->",
        "",
        "A setting can be written in a YAML file, as a variable, as a flag or as an argument of `LLM`.",
        "The command line wins over the environment, the environment over the file, the file over arguments.",
        "`jackfield config show --origin` shows every value and where it comes from.",
    ]
    for section, info in ConfigTree.model_fields.items():
        lines += ["", f"## {section}", "", str(info.description), ""]
        lines += ["| setting | flag | variable | takes | default |", "|---|---|---|---|---|"]
        rows = [leaf for leaf in schema.leaves() if leaf.path[0] == section]
        lines += [_table_row(leaf) for leaf in rows]
        lines += ["", *(f"- `{'.'.join(leaf.path)}`: {leaf.help}" for leaf in rows)]
    return "\n".join([*lines, "", *_renamed_lines()]) + "\n"


def _table_row(leaf: schema.Leaf) -> str:
    dotted = ".".join(leaf.path)
    flag = "--" + (leaf.flat or dotted).replace("_", "-")
    takes = type_words(leaf.annotation).replace("|", "\\|")
    return f"| `{dotted}` | `{flag}` | `{variable_name(dotted)}` | {takes} | `{_default(leaf.default)}` |"


def _default(value: Any) -> str:
    if value is None or value in ((), {}):
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value) or "not set"


def _renamed_lines() -> Iterator[str]:
    yield "## Names of other engines"
    yield ""
    yield "| name | here | accepted | note |"
    yield "|---|---|---|---|"
    for row in renamed.table().values():
        here = f"`{row.to}`" if row.to else "none"
        yield f"| `{row.name}` | {here} | {'yes' if row.same else 'no'} | {row.note} |"
