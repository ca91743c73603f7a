"""Models in object stores and on web servers, by fsspec: ``s3://``, ``gs://``, ``http://``, ``memory://``.

They are fetched into the model cache, all files or none. A copy serves as long as the store says that nothing changed,
or when the store cannot be reached.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from jackfield.errors import CheckpointError, ConfigError, ModelNotFoundError
from jackfield.sources.files import FOLDER_SUFFIXES, belongs, is_module
from jackfield.sources.progress import Progress

PYTORCH = (".bin", ".pt", ".pth")
"""Weights of models that have no safetensors."""
SUFFIXES = (*FOLDER_SUFFIXES, ".gguf", *PYTORCH)
PACKAGES: Mapping[str, str] = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
}
"""Scheme → the package that fsspec needs for it."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://")
_LOCAL = ("file", "local")
_CHUNK = 4 << 20
_MARKS = ("ETag", "etag", "md5Hash", "md5", "crc32c", "mtime", "LastModified", "updated", "created", "last_modified")
"""Keys of a store's answer that change with a file."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a model: its path in the store, its name below the model's folder, its size in bytes, and what
    changes when it changes.
    """

    path: str
    name: str
    size: int
    mark: str


def is_remote(spec: str) -> bool:
    """Return whether a model is named by a URL."""
    return _SCHEME.match(spec) is not None


def remote_model(url: str, models: Path, progress: Progress | None = None) -> Path:
    """Return the folder or the GGUF file of a model in an object store, fetched unless the cache has it.

    Args:
        url: of a folder with a model, or of one GGUF file. models: the model cache; the model lies below it in
            ``remote/HASH``. progress: told of bytes fetched.

    Raises:
        ConfigError: the scheme is unknown, or its package is not installed.
        ModelNotFoundError: the store has no model there or cannot be reached, and the cache does not hold it.
        CheckpointError: a file is not as long as the store says, or the disk is full.
    """
    scheme = urlsplit(url).scheme
    home = models / "remote" / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:32]
    system, root = _open(url, scheme)
    try:
        files = _listing(system, root)
    except Exception as error:  # each store's client raises errors of its own
        return _from_cache(home, url, error)
    if not files:
        raise _missing(url, "there is no model at this address")
    target = home / _digest(files)
    if not target.is_dir():
        _fetch(system, files, target, url, progress)
    return _model_in(target)


def _open(url: str, scheme: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as error:
        raise _lacking("fsspec", url) from error
    if scheme in _LOCAL or "::" in url:
        raise ConfigError(
            "this is no address of an object store", field="model", value=url, remedy="write a plain path instead"
        )
    try:
        system, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise _lacking(PACKAGES.get(scheme, f"of fsspec for {scheme}"), url) from error
    except ValueError as error:
        known = ", ".join(sorted({*PACKAGES, "memory"}))
        raise ConfigError(
            f"the scheme {scheme} is unknown: {error}", field="model", value=url, remedy=f"known are {known}"
        ) from error
    return system, root


def _lacking(package: str, url: str) -> ConfigError:
    return ConfigError(
        f"this address needs the package {package}, which is not installed",
        field="model",
        value=url,
        remedy=f"pip install {package}; or pip install 'jackfield[remote]' for all stores",
    )


def _listing(system: Any, root: str) -> list[RemoteFile]:
    if root.endswith(".gguf"):
        return [_file(system.info(root), root)]
    entries = system.ls(root, detail=True)
    files = [_file(entry, str(entry["name"])) for entry in entries if entry.get("type") != "directory"]
    chosen = [file for file in files if file.name.endswith(SUFFIXES)]
    if any(file.name.endswith(".safetensors") for file in chosen):
        chosen = [file for file in chosen if not file.name.endswith(PYTORCH)]
    for folder in (str(entry["name"]) for entry in entries if entry.get("type") == "directory"):
        if is_module(_last(folder)):
            inner = [_file(e, str(e["name"]), _last(folder)) for e in system.ls(folder, detail=True)]
            chosen += [file for file in inner if belongs(PurePosixPath(file.name))]
    return sorted(chosen, key=lambda file: file.name)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _file(entry: Mapping[str, Any], path: str, folder: str = "") -> RemoteFile:
    name = _last(path)
    size = entry.get("size")
    if name in ("", ".", "..") or not name.isprintable() or any(char in name for char in "\\:"):
        raise CheckpointError(
            f"the store names a file '{name}'", field="path", value=path, remedy="do not use this model"
        )
    mark = next((f"{key}={entry[key]}" for key in _MARKS if entry.get(key)), "")
    return RemoteFile(path, f"{folder}/{name}" if folder else name, size if isinstance(size, int) else -1, mark)


def _digest(files: list[RemoteFile]) -> str:
    text = json.dumps([(file.name, file.size, file.mark) for file in files])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _from_cache(home: Path, url: str, cause: Exception) -> Path:
    if isinstance(cause, CheckpointError):
        raise cause
    copies = sorted(home.glob("[0-9a-f]*"), key=lambda path: path.stat().st_mtime) if home.is_dir() else []
    if not copies or isinstance(cause, FileNotFoundError):
        raise _missing(url, f"the store did not give this model: {type(cause).__name__}: {cause}") from cause
    return _model_in(copies[-1])


def _missing(url: str, message: str) -> ModelNotFoundError:
    remedy = "check the address, the network and the store's credentials; or name a local path"
    return ModelNotFoundError(message, field="model", value=url, remedy=remedy)


def _fetch(system: Any, files: list[RemoteFile], target: Path, url: str, progress: Progress | None) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    total, done = sum(max(file.size, 0) for file in files), 0
    if total > shutil.disk_usage(target.parent).free:
        raise CheckpointError(
            f"the model takes {total} bytes, more than the disk has free",
            field="path",
            value=str(target.parent),
            remedy="free some space or choose another cache folder",
        )

    def tell(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(f"download {url}", done, total)

    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as temporary:
        folder = Path(temporary) / target.name
        folder.mkdir()
        for file in files:
            (folder / file.name).parent.mkdir(exist_ok=True)
            _fetch_file(system, file, folder / file.name, url, tell)
        try:
            os.replace(folder, target)
        except OSError:
            if not target.is_dir():  # another process may have been first
                raise


def _fetch_file(system: Any, file: RemoteFile, place: Path, url: str, tell: Callable[[int], None]) -> None:
    try:
        with system.open(file.path, "rb") as source, place.open("xb") as sink:
            count = _copy(source, sink, file.size, tell)
    except Exception as error:  # each store's client raises errors of its own
        raise _missing(url, f"{file.name} could not be fetched: {type(error).__name__}: {error}") from error
    if file.size >= 0 and count != file.size:
        raise CheckpointError(
            f"{file.name} has {count} bytes or more, the store says {file.size}",
            field="path",
            value=file.path,
            remedy="fetch it again; the file may have been changed meanwhile",
        )


def _copy(source: BinaryIO, sink: BinaryIO, size: int, tell: Callable[[int], None]) -> int:
    """Copy at most one chunk more than ``size`` bytes, and return how many."""
    count = 0
    while chunk := source.read(_CHUNK):
        sink.write(chunk)
        count += len(chunk)
        tell(len(chunk))
        if 0 <= size < count:
            break
    return count


def _model_in(folder: Path) -> Path:
    """Return the one file of a GGUF model, or the folder."""
    files = list(folder.iterdir())
    return files[0] if len(files) == 1 and files[0].suffix == ".gguf" else folder
