"""Access to the stored bytes of a checkpoint's tensors, memory-mapped. Turning them into torch tensors is the
loader's work.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from jackfield.checkpoint.binary import corrupt
from jackfield.checkpoint.ggml_types import GGML_WORDS, PLAIN_DTYPES, PREFIX
from jackfield.errors import CheckpointError, did_you_mean
from jackfield.interfaces.facts import ModelFacts, TensorFacts

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_STORAGE = {
    "bool": "?",
    "bfloat16": "<u2",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "uint8": "u1",
    "int8": "i1",
    "uint16": "<u2",
    "int16": "<i2",
    "uint32": "<u4",
    "int32": "<i4",
    "uint64": "<u8",
    "int64": "<i8",
}


class TensorSource:
    """The tensors of one checkpoint as read-only numpy views.

    Types that numpy lacks come as the unsigned integers of their size; ``facts.tensors[name].dtype`` says what they
    are. Files are mapped when first needed and stay mapped until :meth:`close`.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self._maps: dict[str, Array] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.facts.tensors)

    def __len__(self) -> int:
        return len(self.facts.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.facts.tensors

    @property
    def nbytes(self) -> int:
        """Stored size of all tensors."""
        return sum(tensor.nbytes for tensor in self.facts.tensors.values())

    def get(self, name: str) -> Array:
        """Return a view of one tensor.

        Shapes are logical, but for packed GGML types, which come as uint8 ``[..., row bytes]``, and 4-bit floats,
        which come as uint8 with two values a byte.

        Raises:
            CheckpointError: there is no such tensor, or its file changed since the facts were read.
        """
        tensor = self.facts.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"the checkpoint has no tensor '{name}'",
                field="tensor",
                value=name,
                remedy=did_you_mean(name, self.facts.tensors) or "use the architecture that the checkpoint names",
            )
        dtype, shape = stored_layout(tensor)
        raw = self._bytes(tensor)
        return raw.view(dtype).reshape(shape)

    def release(self, file: str) -> None:
        """Forget one mapped file, so that its pages count no longer as this process's memory."""
        self._maps.pop(file, None)

    def close(self) -> None:
        """Forget all mapped files. Views that were handed out stay valid."""
        self._maps.clear()

    def _bytes(self, tensor: TensorFacts) -> Array:
        data = self._maps.get(tensor.file)
        if data is None:
            data = self._maps[tensor.file] = _map_file(Path(tensor.file))
        raw = data[tensor.offset : tensor.offset + tensor.nbytes]
        if raw.nbytes != tensor.nbytes:
            corrupt(tensor.file, f"{Path(tensor.file).name} is shorter than when its header was read")
        return raw


def open_tensors(facts: ModelFacts) -> TensorSource:
    """Return access to the tensors of a checkpoint whose facts were read."""
    return TensorSource(facts)


def stored_layout(tensor: TensorFacts) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return numpy's type and the stored shape of a tensor."""
    word = tensor.dtype
    if word.startswith(PREFIX) and word.removeprefix(PREFIX) not in PLAIN_DTYPES:
        kind = GGML_WORDS[word]
        return np.dtype("u1"), (*tensor.shape[:-1], tensor.shape[-1] // kind.block * kind.nbytes)
    word = PLAIN_DTYPES.get(word.removeprefix(PREFIX), word)
    if word.endswith("_x2"):
        return np.dtype("u1"), (*tensor.shape[:-1], tensor.shape[-1] // 2)
    return np.dtype(_STORAGE.get(word, "u1")), tensor.shape


def _map_file(path: Path) -> Array:
    try:
        return np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        corrupt(path, f"{path.name} cannot be mapped: {error}", remedy="check the path and its rights")
