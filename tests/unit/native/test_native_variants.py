"""The same sources for other processors, and under sanitizers."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import native_exercise
import pytest
from native_world import block_values, stored, values_of

from jackfield_native.build import library_path
from jackfield_native.library import TYPES, load
from jackfield_native.products import decode_rows
from jackfield_native.toolchain import find_compiler

X86 = platform.machine() in ("x86_64", "AMD64")
pytestmark = pytest.mark.slow

VARIANTS = {"four lanes": ("-DJF_PLAIN", "-O1")}
if X86:
    VARIANTS |= {"oldest x86-64": ("-march=x86-64", "-O1"), "avx2": ("-march=haswell", "-O1")}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_other_processors(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = load(library_path(tmp_path, VARIANTS[variant]))
    native_exercise.use(library, monkeypatch.setattr)
    for word in TYPES:
        columns = 2 * max(32, block_values(word)) + (5 if block_values(word) == 1 else 0)
        assert (decode_rows(weight := stored(word, 5, columns), word, columns) == values_of(weight, word)).all()
    native_exercise.exercise()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the build with sanitizers is kept."""
    return tmp_path_factory.mktemp("sanitized")


def run_sanitized(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the exercise on a build with address and undefined-behaviour sanitizers."""
    compiler = str(find_compiler())
    asked = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    sanitizer = asked.stdout.strip()
    assert Path(sanitizer).is_absolute(), f"{compiler} has no address sanitizer"
    flags = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    environment = {**os.environ, "LD_PRELOAD": sanitizer, "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, native_exercise.__file__, str(library_path(folder, flags)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def test_nothing_is_read_or_written_outside(folder: Path) -> None:
    """Buffers are exactly as large as they must be."""
    done = run_sanitized(folder)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr[-3000:]


def test_the_sanitizer_would_find_it(folder: Path) -> None:
    done = run_sanitized(folder, "too short")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
