"""Habits that a linter does not know."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator

from repo import CORE, PLUGINS, ROOT, sources, trees

VENDOR_WORDS = (
    *("nvidia", "cuda", "cudnn", "nccl", "cutlass", "hopper", "blackwell", "ampere", "geforce"),
    *("amd", "rocm", "hip", "radeon", "instinct", "rccl", "aiter"),
    *("intel", "xpu", "gaudi", "habana", "hpu", "oneccl", "ipex"),
    *("tpu", "google", "ascend", "npu", "huawei", "cann", "neuron", "trainium", "inferentia"),
    *("apple", "mps", "metal", "qualcomm", "cambricon", "mlu", "musa", "mthreads", "tenstorrent", "graphcore"),
)
EXAMPLES = {("framework/jackfield/interfaces/facts.py", "cuda"), ("framework/jackfield/interfaces/plugin.py", "cuda")}
"""Docstrings of the plugin API that show torch's name of a device type as an example."""
MAX_LINES = 500
MAX_FUNCTION = 60
"""A function may never be longer; the budgets below are for all of them together."""


def test_no_vendor_is_named_in_the_core() -> None:
    pattern = re.compile(rf"(?<![a-z])({'|'.join(VENDOR_WORDS)})(?![a-z])", re.IGNORECASE)
    found = {(name, match.group(1).lower()) for name, text in sources(CORE) for match in pattern.finditer(text)}
    assert sorted(found - EXAMPLES) == []


def test_the_environment_is_read_in_one_module() -> None:
    found = {
        name
        for name, tree in trees(CORE, PLUGINS)
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv", "environb"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and "environ" in {n.name for n in node.names})
    }
    assert found - {"framework/jackfield/config/environment.py"} == set()


def test_print_is_for_the_command_line() -> None:
    found = {
        f"{name}:{node.lineno}"
        for name, tree in trees(CORE, PLUGINS)
        if not name.startswith("framework/jackfield/cli/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert found == set()


def test_there_are_no_global_statements() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, tree in trees(CORE, PLUGINS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]
    assert found == []


def test_imports_are_absolute() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, tree in trees(CORE, PLUGINS)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert found == []


def test_files_are_short() -> None:
    lengths = {name: text.count("\n") for name, text in sources(CORE, PLUGINS, ROOT / "tests")}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def functions() -> Iterator[tuple[str, int]]:
    """Yield the place and the number of lines of every function, without its docstring."""
    for name, tree in trees(CORE, PLUGINS):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}:{node.name}", _body_lines(node)


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    has_doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    doc = (first.end_lineno or first.lineno) - first.lineno + 1 if has_doc else 0
    return (node.end_lineno or node.lineno) - node.lineno + 1 - doc


def test_functions_are_short() -> None:
    found = list(functions())
    lengths = sorted(length for _, length in found)
    assert statistics.median(lengths) <= 10
    assert lengths[int(len(lengths) * 0.9)] < 30
    assert [place for place, length in found if length > MAX_FUNCTION] == []


def test_every_module_has_a_docstring() -> None:
    empty = [name for name, tree in trees(CORE, PLUGINS) if not ast.get_docstring(tree)]
    assert empty == []
