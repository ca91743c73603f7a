"""Who imports whom, how much is imported, and what importing changes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import grimp
import pytest
from repo import CORE, ROOT, plugin_packages, pyproject, run_python

SLACK = 4.0
"""Factor on time budgets, for machines that are slow or busy."""
HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf", "numba", "triton")
LIGHT_PARTS = ("errors", "interfaces", "config", "protocol", "checkpoint", "sources", "registry", "oracle", "cli")
PLUGINS_MAY_USE = (
    "jackfield_native",
    "jackfield_triton",
    "jackfield.interfaces",
    "jackfield.layers",
    "jackfield.errors",
    "jackfield.testing",
)
BELOW_THE_ORACLE = (
    *("distributed", "sampling", "kv_cache", "tokenizer", "structured_output", "multimodal", "metrics"),
    *("layers", "scheduler", "loader"),
)
"""Parts that lie above the oracle and the registry in the picture, and yet know nothing of them."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("jackfield", *plugin_packages(), cache_dir=None)


def test_import_contracts() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout


def test_plugins_use_the_public_parts_only(graph: grimp.ImportGraph) -> None:
    wrong = [
        f"{module} -> {imported}"
        for module in sorted(graph.modules)
        if not module.startswith("jackfield.") and module != "jackfield"
        for imported in sorted(graph.find_modules_directly_imported_by(module))
        if imported.split(".")[0] != module.split(".")[0] and not imported.startswith(PLUGINS_MAY_USE)
    ]
    assert wrong == []


def test_parts_that_know_nothing_of_the_oracle(graph: grimp.ImportGraph) -> None:
    parts = tuple(f"jackfield.{name}" for name in BELOW_THE_ORACLE)
    wrong = [
        f"{module} -> {imported}"
        for module in sorted(graph.modules)
        if module.startswith(parts)
        for imported in sorted(graph.find_modules_directly_imported_by(module))
        if imported.startswith(("jackfield.registry", "jackfield.oracle"))
    ]
    assert wrong == []


@pytest.mark.parametrize("part", LIGHT_PARTS)
def test_light_parts_import_nothing_heavy(part: str) -> None:
    code = (
        "import importlib, json, pkgutil, sys\n"
        "module = importlib.import_module(sys.argv[1])\n"
        "for info in pkgutil.walk_packages(getattr(module, '__path__', ()), module.__name__ + '.'):\n"
        "    importlib.import_module(info.name)\n"
        "print(json.dumps([name for name in sys.argv[2:] if name in sys.modules]))"
    )
    assert json.loads(run_python(code, f"jackfield.{part}", *HEAVY)) == []


def processor_seconds() -> float:
    """Return what programs that ended have taken: other than by the clock, it matters little what runs beside them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def best_seconds(code: str, runs: int = 3) -> float:
    """Return the least of what ``code`` prints."""
    return min(float(run_python(code)) for _ in range(runs))


def test_import_jackfield_is_quick_and_light() -> None:
    code = "import time; t = time.process_time(); import jackfield; print(time.process_time() - t)"
    assert best_seconds(code) < 0.1 * SLACK
    names = run_python("import sys; before = set(sys.modules); import jackfield; print(*(set(sys.modules) - before))")
    foreign = {name.partition(".")[0] for name in names.split()} - set(sys.stdlib_module_names)
    assert foreign == {"jackfield"}


@pytest.mark.parametrize("line", [["--help"], ["generate", "--help"], ["version"]])
def test_help_is_quick(line: list[str]) -> None:
    times = []
    for _ in range(3):
        start = processor_seconds()
        subprocess.run([sys.executable, "-m", "jackfield.cli", *line], capture_output=True, check=True, timeout=60)
        times.append(processor_seconds() - start)
    assert min(times) < 0.5 * SLACK


@pytest.mark.parametrize("line", [["--help"], ["generate", "--help"], ["plugins"], ["config", "show"]])
def test_commands_that_need_no_torch(line: list[str]) -> None:
    code = (
        "import contextlib, io, json, sys\n"
        "from jackfield.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    code = main(json.loads(sys.argv[1]))\n"
        "print(json.dumps([code, [name for name in ('torch', 'transformers') if name in sys.modules]]))"
    )
    assert json.loads(run_python(code, json.dumps(line))) == [0, []]


def test_importing_changes_nothing_of_the_process() -> None:
    code = (
        "import importlib, logging, multiprocessing, os, sys, warnings\n"
        "import numpy  # which ignores warnings about itself\n"
        "def state():\n"
        "    return (dict(os.environ), logging.root.level, list(logging.root.handlers), list(warnings.filters),\n"
        "            multiprocessing.get_start_method(allow_none=True), os.getcwd(), list(sys.path))\n"
        "before = state()\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "print([i for i, (a, b) in enumerate(zip(before, state())) if a != b])"
    )
    assert run_python(code, "jackfield", *(f"jackfield.{part}" for part in LIGHT_PARTS)).strip() == "[]"


def entry_points() -> list[tuple[str, str]]:
    """Return (group.name, module) of every declared plugin."""
    tables = pyproject()["project"]["entry-points"]
    return [(f"{group}:{name}", target.partition(":")[0]) for group in tables for name, target in tables[group].items()]


@pytest.mark.parametrize("module", sorted({module for _, module in entry_points()}))
def test_plugin_modules_are_light(module: str) -> None:
    code = (
        "import importlib, json, sys\n"
        "importlib.import_module(sys.argv[1])\n"
        "print(json.dumps([name for name in sys.argv[2:] if name in sys.modules]))"
    )
    assert json.loads(run_python(code, module, *HEAVY)) == []


def test_every_part_of_the_core_is_a_package_or_a_module() -> None:
    assert (CORE / "py.typed").exists()
    folders = {path.name for path in CORE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert {path.parent.name for path in CORE.glob("*/__init__.py")} == folders
