"""What the machine has to build and run the kernels with. Nothing here imports torch."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from jackfield.interfaces import Reason

COMPILERS = ("cc", "gcc", "clang")
"""Programs that are tried, in order."""
RUNTIMES = ("libgomp*", "libiomp5*", "libomp.*")
"""Files of OpenMP runtimes that torch is built with."""
PROBE = "#include <math.h>\n#include <stdint.h>\n#include <string.h>\nfloat f(float x) { return erff(x); }\n"
REMEDY = "install a C compiler (on Debian and Ubuntu: apt install build-essential)"


def find_compiler() -> Path | None:
    """Return the machine's C compiler, links resolved."""
    found = next((path for path in map(shutil.which, COMPILERS) if path), None)
    return None if found is None else Path(found).resolve()


def compile_flags() -> tuple[str, ...]:
    """Return the flags of a build for exactly this processor."""
    machine = platform.machine().lower()
    tuned = "-mcpu=native" if machine in ("arm64", "aarch64") else "-march=native"
    return ("-std=c11", "-O3", tuned, "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")


def runtime_file() -> Path | None:
    """Return the OpenMP runtime that torch brings or the environment holds."""
    return next((path for folder in _runtime_folders() for path in _runtimes(folder)), None)


def unavailable() -> Reason | None:
    """Return why kernels cannot be built here, or None. Asked once in a process."""
    return _unavailable(find_compiler(), runtime_file())


@lru_cache
def _unavailable(compiler: Path | None, runtime: Path | None) -> Reason | None:
    if compiler is None:
        return Reason("compiler", "environment", f"none of {', '.join(COMPILERS)} is installed", REMEDY)
    if runtime is None:
        return Reason("openmp", "environment", "torch brings no OpenMP runtime", "use a wheel of torch from PyPI")
    problem = _try(compiler)
    if problem:
        return Reason("compiler", "environment", f"{compiler} cannot build a library: {problem}", REMEDY)
    return None


def _try(compiler: Path) -> str:
    """Build a tiny library; return the compiler's first complaint, or an empty string."""
    with tempfile.TemporaryDirectory(prefix="jackfield-probe-") as folder:
        source, target = Path(folder, "probe.c"), Path(folder, "probe.so")
        source.write_text(PROBE)
        return run_compiler(compiler, ("-shared", "-fPIC"), (source,), target)


def run_compiler(compiler: Path, flags: tuple[str, ...], sources: tuple[Path, ...], target: Path) -> str:
    """Build ``target``; return the first error line of the compiler, or an empty string."""
    command = [str(compiler), *flags, *map(str, sources), "-o", str(target), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line] or lines or [f"exit status {done.returncode}"]
    return errors[0] if done.returncode else ""


def _runtime_folders() -> Iterator[Path]:
    spec = find_spec("torch")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(location, "lib")
        yield Path(location).with_name("torch.libs")
    yield Path(sys.prefix, "lib")


def _runtimes(folder: Path) -> Iterator[Path]:
    for pattern in RUNTIMES:
        yield from sorted(folder.glob(pattern))
