"""The plugin API does not change by accident."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from api import SNAPSHOT, describe, snapshot

from jackfield.interfaces import FAMILIES, Plugin

HOW = "raise the family's version in jackfield/interfaces/families.py, then run: python tests/guards/api.py"


def test_signatures_are_those_of_the_snapshot() -> None:
    stored: dict[str, Any] = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    current: dict[str, Any] = json.loads(json.dumps(snapshot()))
    names = sorted({*stored["api"], *current["api"]})
    changed = [name for name in names if stored["api"].get(name) != current["api"].get(name)]
    assert changed == [], HOW
    assert stored["versions"] == current["versions"], "run: python tests/guards/api.py"


def test_bases_declare_the_family_they_belong_to() -> None:
    assert {name: family.base.family for name, family in FAMILIES.items()} == {name: name for name in FAMILIES}
    assert all(issubclass(family.base, Plugin) for family in FAMILIES.values())


@pytest.mark.parametrize("change", ["argument", "default", "method", "field"])
def test_the_snapshot_sees_changes(change: str) -> None:
    @dataclass
    class Before:
        size: int = 1

        def ask(self, name: str) -> str:
            return name

    namespace: dict[str, Any] = {"dataclass": dataclass}
    extra = {"argument": ", more: int = 0", "method": "): ...\n  def tell(self"}.get(change, "")
    fields = {"default": "size: int = 2", "field": "size: int = 1; more: int = 1"}.get(change, "size: int = 1")
    source = f"class Before:\n  {fields}\n  def ask(self, name: str{extra}) -> str: ...\n"
    exec(f"from __future__ import annotations\n@dataclass\n{source}", namespace)
    assert describe(namespace["Before"]) != describe(Before)
