"""Reads the header of a GGUF file: metadata and tensor table, nothing of the weights.

Source: the GGUF specification, versions 2 and 3 (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Every
count and length is checked against the size of the file before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jackfield.checkpoint.binary import Cursor, corrupt
from jackfield.checkpoint.extents import check_extents
from jackfield.checkpoint.ggml_types import GGML_TYPES, GgmlType
from jackfield.interfaces.facts import TensorFacts

HEADER_LIMIT = 512 << 20
"""Bytes; the largest headers of real models (vocabulary and merges) take about 20 MiB."""
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_ELEMENTS = 1 << 22
"""Of all arrays that are kept together; the largest vocabularies have half a million merges."""
MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_NUMPY = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of one GGUF file.

    Args:
        path: the file.
        version: 2 or 3.
        metadata: all keys; arrays are lists.
        skipped: keys of arrays that were longer than the reader was asked for, with their lengths.
        tensors: by name, with logical shapes, outermost dimension first.
    """

    path: str
    version: int
    metadata: Mapping[str, Any]
    skipped: Mapping[str, int]
    tensors: Mapping[str, TensorFacts]


@dataclass(frozen=True, slots=True)
class ArrayLimits:
    """The longest arrays that are kept; longer ones are stepped over."""

    numbers: int = MAX_ELEMENTS
    strings: int = MAX_ELEMENTS


def read_gguf(path: str | Path, limits: ArrayLimits | None = None) -> GgufFile:
    """Return the header of the GGUF file at ``path``.

    Args:
        path: one file; of a sharded model, one shard.
        limits: which arrays to keep; all by default.

    Raises:
        CheckpointError: the file is no GGUF file of a known version, or is truncated or inconsistent.
    """
    path = Path(path)
    try:
        with Cursor(path, HEADER_LIMIT) as cursor:
            return _read(cursor, limits or ArrayLimits())
    except OSError as error:
        corrupt(path, f"{path.name} cannot be read: {error.strerror or error}", remedy="check the path and its rights")


def _read(cursor: Cursor, limits: ArrayLimits) -> GgufFile:
    version = _read_version(cursor)
    # A tensor takes at least name length, dimension count, type and offset; a key its length, type and one byte.
    tensor_count = cursor.count("tensors", least=24, most=MAX_TENSORS)
    key_count = cursor.count("metadata keys", least=13, most=MAX_KEYS)
    metadata: dict[str, Any] = {}
    skipped: dict[str, int] = {}
    for _ in range(key_count):
        _read_key(cursor, limits, metadata, skipped)
    tensors = _read_tensors(cursor, tensor_count, _alignment(cursor, metadata))
    return GgufFile(str(cursor.path), version, metadata, skipped, tensors)


def _read_version(cursor: Cursor) -> int:
    name = cursor.path.name
    magic = cursor.take(4, "the magic number")
    if magic != b"GGUF":
        corrupt(cursor.path, f"{name} is no GGUF file: it begins with {magic!r}", remedy="check which file this is")
    version = int(cursor.number("I", "the version"))
    if version and version % 65536 == 0:
        corrupt(cursor.path, f"{name} is a big-endian GGUF file", remedy="convert it to little-endian")
    if version not in (2, 3):
        corrupt(cursor.path, f"{name} has GGUF version {version}; 2 and 3 are known", remedy="convert the model again")
    return version


def _read_key(cursor: Cursor, limits: ArrayLimits, metadata: dict[str, Any], skipped: dict[str, int]) -> None:
    key = _read_string(cursor, "a metadata key")
    if key in metadata or key in skipped:
        corrupt(cursor.path, f"{cursor.path.name}: metadata key '{key}' occurs twice")
    kind = int(cursor.number("I", f"the type of '{key}'"))
    if kind != _ARRAY:
        metadata[key] = _read_scalar(cursor, kind, key)
        return
    length, value = _read_array(cursor, limits, key)
    if value is None:
        skipped[key] = length
    else:
        metadata[key] = value


def _read_string(cursor: Cursor, what: str) -> str:
    raw = cursor.take(int(cursor.number("Q", f"the length of {what}")), what)
    return raw.decode("utf-8", errors="replace")


def _read_scalar(cursor: Cursor, kind: int, key: str) -> Any:
    if kind == _STRING:
        return _read_string(cursor, f"the value of '{key}'")
    if kind not in _CODES:
        corrupt(cursor.path, f"{cursor.path.name}: metadata key '{key}' has the unknown type {kind}")
    return cursor.number(_CODES[kind], f"the value of '{key}'")


def _read_array(cursor: Cursor, limits: ArrayLimits, key: str) -> tuple[int, list[Any] | None]:
    """Return the length, and the elements or None when they are too many to keep."""
    what = f"elements of '{key}'"
    kind = int(cursor.number("I", f"the element type of '{key}'"))
    if kind == _ARRAY:
        corrupt(cursor.path, f"{cursor.path.name}: metadata key '{key}' holds arrays of arrays")
    length = cursor.count(what, least=_SIZES.get(kind, 8), most=MAX_ELEMENTS)
    if length <= (limits.strings if kind == _STRING else limits.numbers):
        cursor.spend(length, MAX_ELEMENTS, what)
    if kind == _STRING:
        return length, _read_strings(cursor, length, what, keep=length <= limits.strings)
    if kind not in _NUMPY:
        corrupt(cursor.path, f"{cursor.path.name}: metadata key '{key}' has the unknown element type {kind}")
    if length > limits.numbers:
        cursor.skip(length * _SIZES[kind], what)
        return length, None
    raw = cursor.take(length * _SIZES[kind], what)
    return length, np.frombuffer(raw, dtype=_NUMPY[kind]).tolist()


def _read_strings(cursor: Cursor, length: int, what: str, *, keep: bool) -> list[Any] | None:
    if keep:
        return [_read_string(cursor, what) for _ in range(length)]
    for _ in range(length):
        cursor.skip(int(cursor.number("Q", what)), what)
    return None


def _alignment(cursor: Cursor, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 20 or value & (value - 1):
        corrupt(cursor.path, f"{cursor.path.name}: general.alignment is {value!r}, which is no power of two")
    return value


@dataclass(slots=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    kind: GgmlType
    offset: int


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorFacts]:
    entries: dict[str, _Entry] = {}
    for _ in range(count):
        entry = _read_entry(cursor)
        if entry.name in entries:
            corrupt(cursor.path, f"{cursor.path.name}: tensor '{entry.name}' occurs twice")
        if entry.offset % alignment:
            corrupt(cursor.path, f"{cursor.path.name}: tensor '{entry.name}' is not aligned to {alignment} bytes")
        entries[entry.name] = entry
    start = -(-cursor.pos // alignment) * alignment
    tensors = {name: _facts(cursor, entry, start) for name, entry in entries.items()}
    check_extents(cursor.path, tensors.values(), cursor.size)
    return tensors


def _read_entry(cursor: Cursor) -> _Entry:
    name = _read_string(cursor, "a tensor name")
    dims = int(cursor.number("I", f"the dimension count of '{name}'"))
    if dims > MAX_DIMS:
        corrupt(cursor.path, f"{cursor.path.name}: tensor '{name}' has {dims} dimensions")
    sizes = [int(cursor.number("Q", f"the shape of '{name}'")) for _ in range(dims)]
    number = int(cursor.number("I", f"the type of '{name}'"))
    if number not in GGML_TYPES:
        corrupt(
            cursor.path,
            f"{cursor.path.name}: tensor '{name}' has the unknown GGML type {number}",
            remedy="use a file in another quantization",
        )
    offset = int(cursor.number("Q", f"the offset of '{name}'"))
    return _Entry(name, tuple(reversed(sizes)), GGML_TYPES[number], offset)


def _facts(cursor: Cursor, entry: _Entry, start: int) -> TensorFacts:
    columns = entry.shape[-1] if entry.shape else 1
    if columns % entry.kind.block:
        corrupt(
            cursor.path,
            f"{cursor.path.name}: tensor '{entry.name}' has rows of {columns} values, "
            f"no multiple of the {entry.kind.block} of a {entry.kind.name} block",
        )
    nbytes = math.prod(entry.shape) // entry.kind.block * entry.kind.nbytes
    return TensorFacts(entry.name, entry.kind.word, entry.shape, str(cursor.path), start + entry.offset, nbytes)
