"""Reads the header of a safetensors file.

Source: https://huggingface.co/docs/safetensors: eight bytes of length, json, then the data. Offsets in the json count
from the end of the header.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jackfield.checkpoint.binary import Cursor, corrupt
from jackfield.checkpoint.extents import check_extents
from jackfield.checkpoint.json_text import parse_json
from jackfield.interfaces.facts import TensorFacts

HEADER_LIMIT = 100_000_000
"""Bytes; the format's own limit."""

MAX_DIMS = 64
"""As many as torch allows."""

DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F4": ("float4_e2m1fn_x2", 4),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "F32": ("float32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F64": ("float64", 64),
    "C64": ("complex64", 64),
}
"""The format's word to torch's word and the bits of one value."""


def read_safetensors(path: Path) -> dict[str, TensorFacts]:
    """Return the tensors of one safetensors file, by name.

    Raises:
        CheckpointError: the file cannot be read, is truncated, or its header is inconsistent.
    """
    try:
        with Cursor(path, HEADER_LIMIT + 8) as cursor:
            header = _read_header(cursor)
            start, size = cursor.pos, cursor.size
    except OSError as error:
        corrupt(path, f"{path.name} cannot be read: {error.strerror or error}", remedy="check the path and its rights")
    header.pop("__metadata__", None)
    tensors = {name: _facts(path, name, entry, start) for name, entry in header.items()}
    check_extents(path, tensors.values(), size)
    return tensors


def _read_header(cursor: Cursor) -> dict[str, Any]:
    length = int(cursor.number("Q", "the header length"))
    if length > HEADER_LIMIT:
        corrupt(cursor.path, f"{cursor.path.name}: a header of {length} bytes is over the limit of {HEADER_LIMIT}")
    raw = cursor.take(length, "the header")
    try:
        header = parse_json(raw)
    except ValueError as error:
        corrupt(cursor.path, f"{cursor.path.name}: the header is no valid json: {error}")
    if not isinstance(header, dict):
        corrupt(cursor.path, f"{cursor.path.name}: the header is no json object")
    return header


def _facts(path: Path, name: str, entry: Any, start: int) -> TensorFacts:
    if not isinstance(entry, Mapping):
        corrupt(path, f"{path.name}: the entry of tensor '{name}' is no json object")
    word = entry.get("dtype")
    if not isinstance(word, str) or word not in DTYPES:
        corrupt(path, f"{path.name}: tensor '{name}' has the unknown dtype {word!r}", remedy="convert the checkpoint")
    shape, offsets = _sizes(path, name, entry.get("shape")), _sizes(path, name, entry.get("data_offsets"))
    dtype, bits = DTYPES[word]
    nbytes = math.prod(shape) * bits // 8
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        corrupt(path, f"{path.name}: tensor '{name}' needs {nbytes} bytes, but its offsets are {list(offsets)}")
    return TensorFacts(name, dtype, shape, str(path), start + offsets[0], nbytes)


def _sizes(path: Path, name: str, value: Any) -> tuple[int, ...]:
    possible = isinstance(value, list) and len(value) <= MAX_DIMS
    if not possible or not all(type(size) is int and 0 <= size < 1 << 63 for size in value):
        corrupt(path, f"{path.name}: tensor '{name}' has the impossible shape or offsets {value!r}")
    return tuple(value)
