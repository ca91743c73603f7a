"""The output file of a batch: what an earlier run left in it, and lines appended to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec

from jackfield.client.batch_lines import key_of, succeeded
from jackfield.errors import ConfigError

_FLAG = "--output-file"
_BEGIN = b'{"id":"batch_req_'
"""How all lines here begin: what is cut off at the end must be one of ours."""


class BatchOutput:
    """Appends lines to an output file, each at once and whole. A context manager.

    A line that a killed run left unfinished at the end is cut off. ``done`` holds what the file has already: a
    custom_id, or the number of a bad line.

    Args:
        path: of the file; made when it does not exist. retry_failed: take lines of failed requests out first, so that
            these are run again.

    Raises:
        ConfigError: the file cannot be used, or holds something else.
    """

    def __init__(self, path: Path, *, retry_failed: bool = False) -> None:
        try:
            if retry_failed and path.exists():
                _drop_failed(path)
            self._file: BinaryIO = path.open("a+b", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"the output file cannot be written: {error}", field=_FLAG, value=str(path), remedy="name another file"
            ) from error
        self.done = set[str | int]()
        size = 0
        for line, _, key in _entries(path):
            self.done.add(key)
            size += len(line)
        self._file.truncate(size)

    def write(self, entry: dict[str, Any]) -> None:
        """Append a line."""
        line = msgspec.json.encode(entry) + b"\n"
        # A signal may split a large write.
        while line:
            line = line[self._file.write(line) :]

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def _drop_failed(path: Path) -> None:
    """Write the file anew without lines of failed requests."""
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("wb") as out:
        out.writelines(line for line, entry, _ in _entries(path) if succeeded(entry))
        out.flush()
        os.fsync(out.fileno())
    fresh.replace(path)


def _entries(path: Path) -> Iterator[tuple[bytes, dict[str, Any], str | int]]:
    """Yield each whole line, its entry, and what it is about. A line without an end is left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and line[: len(_BEGIN)] == _BEGIN[: len(line)]:
                return
            entry = _decode(line)
            key = key_of(entry) if isinstance(entry, dict) and line.endswith(b"\n") else None
            if key is None:
                raise ConfigError(
                    f"line {number} of the output file is no line of a batch's output",
                    field=_FLAG,
                    value=str(path),
                    remedy="name a new file, or one that an earlier run of the same batch wrote",
                )
            yield line, entry, key


def _decode(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
