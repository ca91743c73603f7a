"""A cursor over the header bytes of a file that never reads past the end and never believes a length it was told."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from jackfield.errors import CheckpointError

_BROKEN = "the file is damaged or its download is incomplete: fetch it again"


def corrupt(path: Path | str, message: str, *, remedy: str = _BROKEN) -> NoReturn:
    """Raise a CheckpointError about the file at ``path``."""
    raise CheckpointError(message, field="path", value=str(path), remedy=remedy)


class Cursor:
    """Reads little-endian values from the start of a memory-mapped file, at most ``limit`` bytes of it."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.size = path.stat().st_size
        self.pos = 0
        self._limit = min(self.size, limit)
        self._capped = self.size > limit
        self._kept = 0
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else None

    def __enter__(self) -> Cursor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._map is not None:
            self._map.close()

    @property
    def left(self) -> int:
        """Bytes that may still be read."""
        return self._limit - self.pos

    def take(self, count: int, what: str) -> bytes:
        """Return the next ``count`` bytes."""
        start = self.skip(count, what)
        return self._map[start : start + count] if self._map is not None else b""

    def skip(self, count: int, what: str) -> int:
        """Step over ``count`` bytes and return where they began."""
        if count > self.left:
            reason = "the header is larger than any real one" if self._capped else "the file ends too early"
            corrupt(self.path, f"{self.path.name}: {reason}: {what} needs {count} bytes at {self.pos}")
        start = self.pos
        self.pos += count
        return start

    def number(self, code: str, what: str) -> int | float | bool:
        """Return one value of the ``struct`` format ``code``."""
        value: int | float | bool = struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]
        return value

    def count(self, what: str, *, least: int, most: int) -> int:
        """Return a 64-bit number of things that take at least ``least`` bytes each, of which ``most`` are allowed."""
        value = int(self.number("Q", what))
        if value > most or value * least > self.left:
            corrupt(self.path, f"{self.path.name}: {value} is no possible number of {what}")
        return value

    def spend(self, count: int, most: int, what: str) -> None:
        """Account for things that are kept in memory, of which ``most`` are allowed in the whole file."""
        self._kept += count
        if self._kept > most:
            corrupt(self.path, f"{self.path.name}: {self._kept} array elements, up to {what}, are more than {most}")
