"""The list of reason codes: documented, used, and each produced by a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import jackfield.oracle
import jackfield.registry
from jackfield.oracle import REASON_CODES, STAGES
from jackfield.oracle.codes import ENVIRONMENT_CODES

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "reference" / "reasons.md"


def sources() -> list[Path]:
    packages = [Path(package.__file__ or "").parent for package in (jackfield.oracle, jackfield.registry)]
    return [path for package in packages for path in sorted(package.glob("*.py"))]


def constants(path: Path) -> dict[str, str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def test_page_lists_exactly_the_codes_and_stages() -> None:
    text = PAGE.read_text(encoding="utf-8")
    codes, _, stages = text.partition("## Stages")
    assert re.findall(r"^\| `(\w+)` \|", codes, re.MULTILINE) == list(REASON_CODES)
    assert re.findall(r"^\| `(\w+)` \|", stages, re.MULTILINE) == list(STAGES)


def test_every_code_of_the_source_is_listed() -> None:
    codes = {name: value for path in sources() if path.name == "codes.py" for name, value in constants(path).items()}
    stages_only = {"CHECK", "ENVIRONMENT", "PREFERENCE", "ACCEPTED"}
    assert {value for name, value in codes.items() if name not in stages_only} == set(REASON_CODES)


def test_literal_codes_in_the_source_are_listed() -> None:
    literal = {
        node.args[0].value
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("Reason", "PluginFailure", "RefusedError")
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    assert literal - set(REASON_CODES) == set()


def test_every_code_of_the_algorithm_is_expected_by_some_test() -> None:
    tests = [path for folder in ("oracle", "registry") for path in sorted((HERE.parent / folder).glob("test_*.py"))]
    text = "".join(path.read_text(encoding="utf-8") for path in tests if path.name != Path(__file__).name)
    codes = [code for code in REASON_CODES if code not in ENVIRONMENT_CODES]
    assert [code for code in codes if f'"{code}"' not in text and f"{code}: " not in text] == []
