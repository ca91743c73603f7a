"""Products with weights in any of the storage types that the kernels read.

Legend: T rows of activations, I inputs, O outputs, B bytes or numbers of a stored row.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from jackfield_native.library import TILE_OUTPUTS, TYPES, kernels

DECODED_NUMBERS = 1 << 20
"""Numbers of a weight that are decoded at once where there are many rows; 4 MiB of float32."""

PACKED = frozenset(word for word in TYPES if word.startswith("Q"))
"""Types of packed integers."""

Part = tuple[torch.Tensor, str]
"""Some outputs of a weight: [O, B], contiguous inside a row, and GGML's word for the storage type."""


class Weight:
    """A weight [O, I] in parts that are stacked along the outputs. Holds addresses, so its tensors must stay in place.

    Args:
        parts: in order. inputs: I. integers: whether up to :func:`integer_rows` rows are rounded to 16 bits, 32 numbers
            at a time, before they are multiplied with packed parts: each number is off by less than 1/65534 of the
            largest of its 32.
    """

    def __init__(self, parts: Sequence[Part], inputs: int, *, integers: bool = False) -> None:
        self.parts = tuple(parts)
        self.inputs = inputs
        self.outputs = sum(part.shape[0] for part, _ in parts)
        decoded = [part.shape[0] for part, word in parts if TYPES[word]]
        # One row is multiplied with stored numbers directly, but for outputs that fill no tile.
        self._most_without_scratch = 1 if decoded else sys.maxsize
        if any(outputs % TILE_OUTPUTS for outputs in decoded):
            self._most_without_scratch = 0
        self._rounded = integer_rows() if integers and any(word in PACKED for _, word in parts) else 0
        self._calls: list[tuple[int, int, int, int, int, bool]] = []
        start = 0
        for part, word in parts:
            row_bytes = part.stride(0) * part.element_size()
            self._calls.append((TYPES[word], part.data_ptr(), row_bytes, start, part.shape[0], word in PACKED))
            start += part.shape[0]
        self._product = kernels().jf_product
        self._empty = torch.empty
        self._threads = torch.get_num_threads

    def few_rows(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None, out_TO: torch.Tensor) -> torch.Tensor:
        """Write ``x @ W.T + bias`` into ``out`` and return it. The weight is read once.

        Args:
            x_TI: float32, contiguous inside a row. bias_O: float32, contiguous, or None. out_TO: float32, contiguous
                inside a row.
        """
        rows, team = x_TI.shape[0], self._threads()
        scratch, needed = None, team * TILE_OUTPUTS * self.inputs if rows > self._most_without_scratch else 0
        if integers := rows <= self._rounded:
            needed = max(needed, rows * self.inputs * 9 // 16)
        if needed:
            scratch = self._empty(needed, dtype=torch.float32)
        space = None if scratch is None else scratch.data_ptr()
        x, x_stride, out, out_stride = x_TI.data_ptr(), x_TI.stride(0), out_TO.data_ptr(), out_TO.stride(0)
        bias = None if bias_O is None else bias_O.data_ptr()
        for kind, weight, row_bytes, start, outputs, packed in self._calls:
            add = None if bias is None else bias + 4 * start
            to, sizes, how = out + 4 * start, (rows, outputs, self.inputs), (space, integers and packed, team)
            self._product(kind, weight, row_bytes, x, x_stride, add, to, out_stride, *sizes, *how)
        return out_TO

    def many_rows(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None, out_TO: torch.Tensor) -> torch.Tensor:
        """Write ``x @ W.T + bias`` into ``out`` and return it, with torch's product and a tile of the weight at a time.

        Args:
            x_TI, bias_O, out_TO: in one type, which the products are computed in.
        """
        start = 0
        for part_OB, word in self.parts:
            stop = start + part_OB.shape[0]
            _tiled_product(x_TI, part_OB, word, out_TO[:, start:stop])
            start = stop
        return out_TO if bias_O is None else out_TO.add_(bias_O)

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all numbers [O, I]."""
        return torch.cat([decode_rows(part, word, self.inputs) for part, word in self.parts]).to(dtype)


def integer_rows() -> int:
    """Return up to how many rows are multiplied as integers on this machine where that is asked for; 0 for none, where
    float32 is as fast.
    """
    return int(kernels().jf_integer_rows())


def decode_rows(part_OB: torch.Tensor, word: str, inputs: int) -> torch.Tensor:
    """Return the numbers [O, I] of stored rows in float32; exactly those of the format's definition."""
    out_OI = torch.empty((part_OB.shape[0], inputs), dtype=torch.float32)
    decode_into(part_OB, word, out_OI)
    return out_OI


def decode_into(part_OB: torch.Tensor, word: str, out_OI: torch.Tensor) -> None:
    """Write the numbers of stored rows into ``out``, float32 and contiguous inside a row."""
    rows, inputs = out_OI.shape
    stride = part_OB.stride(0) * part_OB.element_size()
    pointers = (part_OB.data_ptr(), stride, out_OI.data_ptr(), out_OI.stride(0))
    kernels().jf_decode(TYPES[word], *pointers, rows, inputs, torch.get_num_threads())


def _tiled_product(x_TI: torch.Tensor, part_OB: torch.Tensor, word: str, out_TO: torch.Tensor) -> None:
    inputs, outputs = x_TI.shape[1], part_OB.shape[0]
    step = max(1, DECODED_NUMBERS // max(1, inputs))
    scratch = torch.empty((min(step, outputs), inputs), dtype=torch.float32)
    for start in range(0, outputs, step):
        tile = scratch[: min(step, outputs - start)]
        decode_into(part_OB[start : start + step], word, tile)
        torch.mm(x_TI, tile.to(x_TI.dtype).t(), out=out_TO[:, start : start + step])
