"""The documents tell the truth: hooks, settings, flags, the walk of a request, and commands."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from repo import DOCS, ROOT, pyproject

from jackfield.cli.app import build_app
from jackfield.cli.entry import engine_command
from jackfield.cli.flags import extract, flag_names
from jackfield.cli.models import render_models
from jackfield.cli.reference import command_flags, commands
from jackfield.cli.reference import render_reference as render_cli
from jackfield.cli.reference_tables import render_metrics, render_plugins
from jackfield.config.reference import render_reference as render_config
from jackfield.interfaces.hooks import Hooks

FROZEN_FLAGS = Path(__file__).with_name("cli_flags.txt")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_the_reference_of_settings_is_current() -> None:
    assert read(DOCS / "reference" / "config.md") == render_config(), "run: make docs-config"


def test_the_reference_of_the_command_line_is_current() -> None:
    assert read(DOCS / "reference" / "cli.md") == render_cli(), "run: make docs-config"


def test_the_list_of_models_is_current() -> None:
    assert read(DOCS / "models.md") == render_models(), "run: make docs-config (and reinstall where models were added)"


@pytest.mark.parametrize(("page", "render"), [("plugins", render_plugins), ("metrics", render_metrics)])
def test_generated_tables_are_current(page: str, render: Callable[[], str]) -> None:
    assert read(DOCS / "reference" / f"{page}.md") == render(), "run: make docs-config (and reinstall)"


def test_every_document_is_in_the_site() -> None:
    listed = set(re.findall(r"([\w/-]+\.md)$", read(ROOT / "mkdocs.yml"), re.MULTILINE))
    assert listed == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def all_flags() -> list[str]:
    """Return one line for each flag: engine flags alone, others behind their command."""
    own = [f"{name} {flag}" for name, command in commands().items() for flag in command_flags(command)]
    return [*flag_names(), *own]


def test_flags_change_only_on_purpose() -> None:
    assert read(FROZEN_FLAGS).splitlines() == all_flags(), f"add or remove the lines in {FROZEN_FLAGS.name}"


def events() -> dict[str, list[str]]:
    """Return the arguments of every hook."""
    found = inspect.getmembers(Hooks, inspect.isfunction)
    return {name: [p for p in inspect.signature(function).parameters if p != "self"] for name, function in found}


def test_every_hook_is_documented_with_its_arguments() -> None:
    text = read(DOCS / "plugins" / "hooks.md")
    documented = dict(re.findall(r"^### `(\w+)\((.*?)\)`$", text, re.MULTILINE))
    assert {name: ", ".join(arguments) for name, arguments in events().items()} == documented


def references(path: Path) -> list[tuple[str, str]]:
    """Return every `path.py:function` that a document names in backticks."""
    return re.findall(r"`([\w./-]+\.py):([\w.]+)`", read(path))


def defined(path: Path) -> set[str]:
    """Return functions, classes and ``Class.method`` names of a file."""
    names = set()
    for node in ast.walk(ast.parse(read(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            parts = (ast.FunctionDef, ast.AsyncFunctionDef)
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, parts)}
    return names


def locate(name: str) -> Path | None:
    """Return the file that a document names, from the repository's root, the core or the plugins."""
    places = [ROOT, ROOT / "framework", ROOT / "framework" / "jackfield", *(ROOT / "plugins").iterdir()]
    return next((place / name for place in places if (place / name).is_file()), None)


def test_the_walk_of_a_request_names_real_functions() -> None:
    found = references(DOCS / "architecture.md")
    assert len(found) >= 10
    wrong = []
    for name, function in found:
        path = locate(name)
        if path is None or function not in defined(path):
            wrong.append(f"{name}:{function}")
    assert wrong == []


def documented_commands() -> list[str]:
    """Return the ``jackfield`` command lines in the README and in the documents' code blocks."""
    lines: list[str] = []
    for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        for block in re.findall(r"^```(?:\w*)\n(.*?)^```", read(path), re.MULTILINE | re.DOTALL):
            joined = block.replace("\\\n", " ")
            lines += re.findall(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*jackfield ([^\n|>]+)", joined, re.MULTILINE)
    return lines


def test_documented_commands_parse() -> None:
    assert parse_faults(documented_commands()) == []


def parse_faults(lines: list[str]) -> list[str]:
    """Return those command lines that the command line would refuse, with the reason."""
    faults = []
    for line in lines:
        tokens = shlex.split(line, comments=True)
        try:
            rest, engine = extract(tokens) if engine_command(tokens) else (tokens, None)
            build_app().parse_args(rest, exit_on_error=False, print_error=False)
            if engine is not None and engine.file is None:
                engine.config()
        except Exception as error:
            faults.append(f"{line}: {error}")
    return faults


@pytest.mark.parametrize("line", ["generate m p --absent 1", "fly m", "config show --blok-size 1", "pull"])
def test_wrong_commands_would_be_found(line: str) -> None:
    assert len(parse_faults([line])) == 1


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", read(ROOT / "Makefile"), re.MULTILINE))
    named = set(re.findall(r"`make ([\w-]+)`|^make ([\w-]+)", read(ROOT / "README.md"), re.MULTILINE))
    assert {name for pair in named for name in pair if name} <= targets


def test_all_markers_are_described() -> None:
    markers = {line.split(":")[0] for line in pyproject()["tool"]["pytest"]["ini_options"]["markers"]}
    assert {"slow", "model", "gpu"} <= markers
