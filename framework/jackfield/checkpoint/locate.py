"""Finds the files that make up a checkpoint: one file, numbered shards, or what an index lists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jackfield.checkpoint.binary import corrupt
from jackfield.errors import CheckpointError, ModelNotFoundError

JSON_LIMIT = 100_000_000
"""Bytes; indexes of the largest models take about 10 MB."""

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})(?P<suffix>\.gguf|\.safetensors)")


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
    """Return what a json file holds.

    Raises:
        CheckpointError: the file is too large, or unreadable.
    """
    try:
        if path.stat().st_size > JSON_LIMIT:
            corrupt(path, f"{path.name} is larger than any real one", remedy="check which file this is")
        value = json.loads(path.read_bytes())
    except OSError as error:
        corrupt(path, f"{path.name} cannot be read: {error.strerror or error}", remedy="check the path and its rights")
    except (ValueError, RecursionError) as error:
        corrupt(path, f"{path.name} is no valid json: {error}")
    return value


def gguf_files(path: Path) -> list[Path]:
    """Return the GGUF file at ``path`` or all its shards in order.

    Raises:
        CheckpointError: a shard is absent.
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


def safetensors_in_folder(folder: Path) -> dict[Path, frozenset[str] | None]:
    """Return the safetensors files of the checkpoint in ``folder`` and, where an index says so, the tensors to take
    from each (None for all of them); empty when there are none.

    Raises:
        CheckpointError: an index is wrong, or a file that it or a file name promises is absent.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _from_index(index)
    single = folder / "model.safetensors"
    if single.exists():
        return {single: None}
    files = sorted(folder.glob("*.safetensors"))
    # The second copies that some checkpoints ship, and adapters, are not the model.
    chosen = [path for path in files if not path.name.startswith(("consolidated", "adapter_"))] or files
    return dict.fromkeys(_with_numbered(folder, chosen))


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
    return {path: frozenset(by_file[path.name]) for path in paths}


def _is_plain_name(file: str) -> bool:
    return file not in ("", ".", "..") and not any(char in file for char in "/\\:\0")


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
