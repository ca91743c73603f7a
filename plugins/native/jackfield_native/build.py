"""Builds the kernels once for this machine and keeps the library in a private folder.

The name of the library holds a digest of all that it depends on, so that another version, compiler or processor makes
another one. Two processes that build at once both succeed: the finished file is moved into place.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import tempfile
from pathlib import Path

from jackfield.errors import PluginError
from jackfield_native.toolchain import REMEDY, compile_flags, find_compiler, run_compiler

SOURCES = Path(__file__).with_name("csrc")
CPUINFO = Path("/proc/cpuinfo")


def library_path(folder: Path | None = None, extra: tuple[str, ...] = ()) -> Path:
    """Return the built library.

    Args:
        folder: where it is kept; by default the user's cache, or a new private folder where that cannot be used.
        extra: further flags of the compiler.

    Raises:
        PluginError: there is no compiler, or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise PluginError("no C compiler is installed", field="native kernels", value=None, remedy=REMEDY)
    flags = (*compile_flags(), *extra)
    folder = private_folder() if folder is None else folder
    target = folder / f"kernels-{digest(compiler, flags)}.so"
    if not target.exists():
        _build(compiler, flags, target)
    return target


def digest(compiler: Path, flags: tuple[str, ...]) -> str:
    """Return 20 hexadecimal digits of the sources, the compiler's file, the flags and the processor."""
    found = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    facts = compiler.stat()
    # The file of a compiler changes with its version, and looking at it is quicker than asking it.
    found.update(repr((str(compiler), facts.st_size, facts.st_mtime_ns, flags, processor())).encode())
    return found.hexdigest()[:20]


def processor() -> tuple[str, ...]:
    """Return the machine's name, and the model and instruction sets of its processor where the system tells."""
    lines: list[str] = []
    if CPUINFO.exists():
        wanted = ("flags", "Features", "model name", "CPU part")
        lines = sorted({line for line in CPUINFO.read_text().splitlines() if line.startswith(wanted)})
    return (platform.machine(), platform.processor(), *lines)


def private_folder() -> Path:
    """Return ``~/.cache/jackfield/native``, which nobody else can write to, or else a new temporary folder."""
    folder = Path.home() / ".cache" / "jackfield" / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_private(folder) and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="jackfield-native-"))


def is_private(folder: Path) -> bool:
    """Return whether the folder is this user's and nobody else may write into it."""
    facts = folder.lstat()
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022


def _build(compiler: Path, flags: tuple[str, ...], target: Path) -> None:
    sources = tuple(sorted(SOURCES.glob("*.c")))
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as folder:
        made = Path(folder, target.name)
        problem = run_compiler(compiler, flags, sources, made)
        if problem:
            raise PluginError(
                f"the native kernels cannot be built: {problem}",
                field="native kernels",
                value=str(compiler),
                remedy=f"{REMEDY}, or choose the torch plugins",
            )
        made.replace(target)
