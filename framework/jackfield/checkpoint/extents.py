"""Checks that the tensors of a file lie inside it and do not share bytes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from jackfield.checkpoint.binary import corrupt
from jackfield.interfaces.facts import TensorFacts


def check_extents(path: Path, tensors: Iterable[TensorFacts], size: int) -> None:
    """Raise CheckpointError when a tensor reaches past ``size`` bytes or two tensors overlap."""
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda entry: (entry.offset, entry.nbytes)):
        stop = tensor.offset + tensor.nbytes
        if stop > size:
            message = f"{path.name}: tensor '{tensor.name}' ends at byte {stop}, the file at byte {size}"
            corrupt(path, message)
        if tensor.offset < end and tensor.nbytes:
            corrupt(path, f"{path.name}: tensors '{before}' and '{tensor.name}' overlap")
        if tensor.nbytes:
            end, before = stop, tensor.name
