"""Writes small checkpoint files byte by byte, so that tests can make them wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

U32, STRING, ARRAY, F32_KEY, BOOL = 4, 8, 9, 6, 7


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, value: str | int | bool | list[str]) -> bytes:
    if isinstance(value, bool):
        return text(name) + struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return text(name) + struct.pack("<II", U32, value)
    if isinstance(value, str):
        return text(name) + struct.pack("<I", STRING) + text(value)
    body = b"".join(map(text, value))
    return text(name) + struct.pack("<IIQ", ARRAY, STRING, len(value)) + body


def entry(name: str, shape: Sequence[int], kind: int, offset: int) -> bytes:
    """``shape`` as GGUF stores it: innermost first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ARCHITECTURE = key("general.architecture", "llama")


def gguf_bytes(
    keys: Sequence[bytes] = (ARCHITECTURE,),
    entries: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    tensor_count, key_count = counts or (len(entries), len(keys))
    head = magic + struct.pack("<IQQ", version, tensor_count, key_count) + b"".join(keys) + b"".join(entries)
    return head + b"\0" * (-len(head) % 32) + data


def safetensors_bytes(header: Mapping[str, Any] | str, data: bytes = b"", *, length: int | None = None) -> bytes:
    raw = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def tensor(dtype: str, shape: Sequence[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def write_folder(folder: Path, files: Mapping[str, bytes | Mapping[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder
