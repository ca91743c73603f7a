"""Finds the files that make up a checkpoint: one file, numbered shards, or what an index lists."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackfield.checkpoint.binary import corrupt
from jackfield.checkpoint.json_text import parse_json
from jackfield.errors import CheckpointError, ModelNotFoundError

JSON_LIMIT = 100_000_000
"""Bytes; indexes of the largest models take about 10 MB."""

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})(?P<suffix>\.gguf|\.safetensors|\.bin)")


@dataclass(frozen=True, slots=True)
class Container:
    """How the weight files of a model folder are called.

    Args:
        index, single: names of the index and of the one file. patterns: of other names. others: starts of names that
            are no weights of the model, or second copies of them.
    """

    index: str
    single: str
    patterns: tuple[str, ...]
    others: tuple[str, ...]


CONTAINERS = {
    "safetensors": Container(
        "model.safetensors.index.json", "model.safetensors", ("*.safetensors",), ("consolidated", "adapter_")
    ),
    "pytorch": Container(
        "pytorch_model.bin.index.json",
        "pytorch_model.bin",
        ("*.bin", "*.pt", "*.pth"),
        ("consolidated", "adapter_", "training_args", "optimizer", "scheduler", "scaler", "rng_state"),
    ),
}
"""By container, the ones that are looked for first in front."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a json file.

    Raises:
        CheckpointError: the file is too large, unreadable, or holds no json object.
    """
    value = read_json_value(path)
    if not isinstance(value, dict):
        corrupt(path, f"{path.name} holds no json object")
    return value


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a json file that lists some.

    Raises:
        CheckpointError: the file is too large, unreadable, or holds no list of json objects.
    """
    value = read_json_value(path)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        corrupt(path, f"{path.name} holds no list of json objects")
    return value


def read_json_value(path: Path) -> Any:
    """Return what a json file holds. ``Infinity`` is allowed: configurations of recurrent models have it.

    Raises:
        CheckpointError: the file is too large, or unreadable.
    """
    try:
        if path.stat().st_size > JSON_LIMIT:
            corrupt(path, f"{path.name} is larger than any real one", remedy="check which file this is")
        value = parse_json(path.read_bytes(), infinity=True)
    except OSError as error:
        corrupt(path, f"{path.name} cannot be read: {error.strerror or error}", remedy="check the path and its rights")
    except ValueError as error:
        corrupt(path, f"{path.name} is no valid json: {error}")
    return value


def gguf_files(path: Path) -> list[Path]:
    """Return all files of the GGUF model that ``path`` belongs to, in the order of their numbers.

    Raises:
        CheckpointError: the number of the file is impossible, or a shard is absent.
    """
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    total = int(match["total"])
    if not 1 <= int(match["number"]) <= total:
        corrupt(path, f"{path.name}: there is no shard {int(match['number'])} of {total}", remedy="rename the file")
    names = [f"{match['stem']}-{number:05d}-of-{match['total']}{match['suffix']}" for number in range(1, total + 1)]
    return _all_present(path.parent, names)


def gguf_in_folder(folder: Path) -> list[Path]:
    """Return the files of the one GGUF model in ``folder``; empty when it holds none.

    Raises:
        CheckpointError: it holds several models, or a shard is absent.
    """
    found = sorted(folder.glob("*.gguf"))
    models = {_model_name(path): path for path in reversed(found)}
    if len(models) > 1:
        raise CheckpointError(
            f"the folder holds {len(models)} GGUF models: {_listing(sorted(path.name for path in models.values()))}",
            field="path",
            value=str(folder),
            remedy="name one of the files",
        )
    return [file for path in models.values() for file in gguf_files(path)]


def weights_in_folder(folder: Path, container: str) -> dict[Path, frozenset[str] | None]:
    """Return the weight files of the checkpoint in ``folder`` and, where an index says so, the tensors to take from
    each (None for all of them); empty when there are none.

    Args:
        folder: the folder. container: one of :data:`CONTAINERS`.

    Raises:
        CheckpointError: an index is wrong, or a file that it or a file name promises is absent.
    """
    kind = CONTAINERS[container]
    index = folder / kind.index
    if index.exists():
        return _from_index(index)
    single = folder / kind.single
    if single.exists():
        return {single: None}
    files = sorted(path for pattern in kind.patterns for path in folder.glob(pattern))
    chosen = [path for path in files if not path.name.startswith(kind.others)]
    # Second copies that some checkpoints ship are not the model, unless there is nothing else.
    copies = files if container == "safetensors" else []
    return dict.fromkeys(_with_numbered(folder, chosen or copies))


def _from_index(index: Path) -> dict[Path, frozenset[str] | None]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        corrupt(index, f"{index.name} has no weight_map of tensor names to file names")
    by_file: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        by_file.setdefault(file, set()).add(tensor)
    outside = sorted(file for file in by_file if not _is_plain_name(file))
    if outside:
        corrupt(
            index,
            f"{index.name} names files that are not plain names in its folder: {_listing(outside)}",
            remedy="do not use this checkpoint: its index points elsewhere",
        )
    paths = _all_present(index.parent, sorted(by_file))
    _check_links(index, paths)
    return {path: frozenset(by_file[path.name]) for path in paths}


def _check_links(index: Path, paths: Iterable[Path]) -> None:
    """Allow links inside the folder, and to where the index itself is linked to: model caches are made so."""
    home, shelf = index.parent.resolve(), index.resolve().parent
    away = [path.name for path in paths if path.resolve().parent not in (home, shelf)]
    if away:
        corrupt(
            index,
            f"{index.name} names links that lead out of its folder: {_listing(away)}",
            remedy="put the files themselves into the folder, or the index beside them",
        )


def _is_plain_name(file: str) -> bool:
    short = len(file.encode("utf-8", "replace")) <= 255 and file.isprintable()
    return short and file not in ("", ".", "..") and not any(char in file for char in "/\\:\0")


def _with_numbered(folder: Path, files: Iterable[Path]) -> list[Path]:
    names: dict[str, None] = {}
    for path in files:
        match = _SHARD.fullmatch(path.name)
        if match is None:
            names[path.name] = None
            continue
        for number in range(1, int(match["total"]) + 1):
            names[f"{match['stem']}-{number:05d}-of-{match['total']}{match['suffix']}"] = None
    return _all_present(folder, list(names))


def _all_present(folder: Path, names: list[str]) -> list[Path]:
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ModelNotFoundError(
            f"{len(absent)} of {len(names)} checkpoint files are absent: {_listing(absent)}",
            field="path",
            value=str(folder),
            remedy="download the missing files into the folder",
        )
    return [folder / name for name in names]


def _model_name(path: Path) -> str:
    match = _SHARD.fullmatch(path.name)
    return f"{match['stem']} of {match['total']}" if match else path.name


def _listing(names: list[str], limit: int = 10) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
