"""Kernels in C, built by the compiler of this machine into folders of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jackfield_native import build, library, toolchain


def test_built_once_and_named_by_all_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.library_path(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build.library_path(tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    compiler = toolchain.find_compiler()
    assert compiler is not None
    flags = toolchain.compile_flags()
    digests = {build.digest(compiler, flags), build.digest(compiler, (*flags, "-g"))}
    monkeypatch.setattr(build, "processor", lambda: ("another",))
    digests.add(build.digest(compiler, flags))
    assert len(digests) == 3
    assert os.listdir(tmp_path) == [first.name]


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    code = "import sys, pathlib, jackfield_native.build as b; print(b.library_path(pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=120)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    (path,) = paths
    assert library.load(Path(path)).jf_team_size(1) == 1
