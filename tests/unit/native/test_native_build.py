"""How the kernels are built, kept and loaded, and what is said where they cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from native_world import threads

from jackfield.errors import PluginError
from jackfield.interfaces import AttentionRequest, OpRequest, QuantizationRequest, Reason
from jackfield_attention.native_cpu import NativeCpuBackend
from jackfield_native import build, library, toolchain
from jackfield_native.toolchain import REMEDY
from jackfield_ops.native_ops import NativeOps
from jackfield_quantization.native_dense import NativeDense
from jackfield_quantization.native_gguf import NativeGguf


def fake_compiler(folder: Path, text: str) -> Path:
    program = folder / "cc"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return program.resolve()


def checks() -> list[list[Reason]]:
    return [
        list(NativeOps.check(OpRequest())),
        list(NativeDense.check(QuantizationRequest())),
        list(NativeGguf.check(QuantizationRequest(kind="gguf"))),
        list(NativeCpuBackend.check(AttentionRequest(num_heads=1, num_kv_heads=1, head_size=8))),
    ]


def test_without_a_compiler_every_plugin_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield_native.toolchain.shutil.which", lambda name: None)
    reason = Reason("compiler", "environment", "none of cc, gcc, clang is installed", REMEDY)
    assert checks() == [[reason]] * 4
    with pytest.raises(PluginError) as caught:
        build.library_path()
    assert str(caught.value) == f"no C compiler is installed\n  field: native kernels = None\n  remedy: {REMEDY}"


def test_without_a_runtime_every_plugin_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_runtime_folders", lambda: iter(()))
    reason = Reason("openmp", "environment", "torch brings no OpenMP runtime", "use a wheel of torch from PyPI")
    assert checks() == [[reason]] * 4


def test_a_compiler_that_fails_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_compiler(tmp_path, "echo 'note: hm' >&2; echo 'fatal error: math.h: no such file' >&2; exit 1")
    monkeypatch.setattr("jackfield_native.toolchain.shutil.which", lambda name: str(program))
    detail = f"{program} cannot build a library: fatal error: math.h: no such file"
    assert checks() == [[Reason("compiler", "environment", detail, REMEDY)]] * 4
    with pytest.raises(PluginError) as caught:
        build.library_path(tmp_path)
    assert str(caught.value) == (
        "the native kernels cannot be built: fatal error: math.h: no such file\n"
        f"  field: native kernels = {str(program)!r}\n  remedy: {REMEDY}, or choose the torch plugins"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cc"], "nothing half built is left"


def test_a_compiler_that_says_nothing(tmp_path: Path) -> None:
    program = fake_compiler(tmp_path, "exit 3")
    assert toolchain.run_compiler(program, (), (), tmp_path / "x") == "exit status 3"
    assert "No such file" in toolchain.run_compiler(tmp_path / "gone", (), (), tmp_path / "x")


def test_the_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    folder = build.private_folder()
    assert folder == tmp_path / ".cache" / "jackfield" / "native"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    other = build.private_folder()
    assert other.name.startswith("jackfield-native-") and build.is_private(other)
    other.rmdir()
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert not build.is_private(link)


def test_a_home_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".cache").write_text("a file in the way")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    folder = build.private_folder()
    assert build.is_private(folder)
    folder.rmdir()


@pytest.mark.parametrize("count", [1, 2])
def test_threads_follow_torch(count: int) -> None:
    with threads(count):
        assert library.kernels().jf_team_size(torch.get_num_threads()) == count


def test_the_openmp_runtime_is_torchs() -> None:
    """Others may be loaded by packages that bring their own; the kernels use torch's threads."""
    library.kernels()
    names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
    runtimes = {name for name in names if Path(name).name.startswith(("libgomp", "libomp", "libiomp"))}
    used = str(library.loaded_runtime())
    assert used in runtimes and used.startswith(str(Path(torch.__file__).parent))


def test_the_light_half_imports_nothing_heavy() -> None:
    code = (
        "import sys, jackfield_native.toolchain, jackfield_native.build, jackfield_attention.native_cpu, "
        "jackfield_ops.native_ops, jackfield_quantization.native_gguf, jackfield_quantization.native_dense; "
        "jackfield_native.toolchain.unavailable(); "
        "print([name for name in ('torch', 'numpy', 'gguf') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
