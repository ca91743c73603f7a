"""Reads weight files ahead of their use, and lets go of each when its tensors have been taken."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

from jackfield.checkpoint import TensorSource
from jackfield.interfaces import ModelFacts

BLOCK = 16 << 20
"""Bytes that one thread reads at a time."""
_PIECE = 1 << 20
_NOT_WAITING = getattr(os, "RWF_NOWAIT", 0)


class ReadAhead:
    """The tensors of a checkpoint, file by file, in the order in which they lie there.

    Tensors are views of mapped files. While one file is taken, threads read the next one, so that the system has it
    when it is asked for; a file that has been taken is unmapped, so that no more than one counts as memory.

    Args:
        source: the checkpoint's tensors. threads: how many read ahead; 0 for none.
    """

    def __init__(self, source: TensorSource, threads: int) -> None:
        self.facts: ModelFacts = source.facts
        self._source = source
        self._threads = threads

    def __iter__(self) -> Iterator[str]:
        files = names_by_file(self.facts)
        order, stop = list(files), Event()
        pool = ThreadPoolExecutor(self._threads, "jackfield-read") if self._threads else None
        try:
            for at, file in enumerate(order):
                for ahead in order[at : at + 2] if at == 0 else order[at + 1 : at + 2]:
                    _start(pool, ahead, stop)
                yield from files[file]
                self._source.release(file)
        finally:
            stop.set()
            if pool is not None:
                pool.shutdown(cancel_futures=True)

    def get(self, name: str) -> Any:
        """Return a view of one tensor; see :meth:`TensorSource.get`."""
        return self._source.get(name)


def names_by_file(facts: ModelFacts) -> Mapping[str, list[str]]:
    """Return the names of tensors by file, in the order in which they lie there."""
    files: dict[str, list[str]] = {}
    for tensor in sorted(facts.tensors.values(), key=lambda tensor: tensor.offset):
        files.setdefault(tensor.file, []).append(tensor.name)
    return dict(sorted(files.items()))


def _start(pool: ThreadPoolExecutor | None, file: str, stop: Event) -> None:
    size = Path(file).stat().st_size if pool is not None else 0
    for offset in range(0, size, BLOCK):
        assert pool is not None
        pool.submit(_read_block, file, offset, min(BLOCK, size - offset), stop)


def _read_block(file: str, offset: int, count: int, stop: Event) -> None:
    """Bring a block into the system's cache. What goes wrong here goes wrong again, and is told, where it is used."""
    buffer = bytearray(_PIECE)
    try:
        with open(file, "rb", buffering=0) as raw:
            if stop.is_set() or _is_cached(raw.fileno(), offset, count):
                return
            for start in range(offset, offset + count, _PIECE):
                if stop.is_set():
                    return
                os.preadv(raw.fileno(), [buffer], start)
    except OSError:
        return


def _is_cached(file: int, offset: int, count: int) -> bool:
    """Return whether both ends of a block can be read without waiting for a disk."""
    if not _NOT_WAITING:
        return False
    try:
        return all(os.preadv(file, [bytearray(1)], at, _NOT_WAITING) for at in (offset, offset + count - 1))
    except OSError:
        return False
