"""Matrices as torchao stores them. Legend: O outputs, I inputs, J groups of inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jackfield.interfaces import ParameterSpec, TensorFacts
from jackfield_quantization.packing import unpack_nibbles
from jackfield_quantization.scaled import Grid
from jackfield_quantization.stored import Piece, Storage, Stored
from jackfield_quantization.torchao import INPUTS, NUMBERS, SCALE, UNUSED, ZERO


def grid(suffix: str, fact: TensorFacts, size: tuple[int, int]) -> Grid:
    """Return how numbers belong to blocks of a matrix of ``size`` (O, I): their shape says how many there are along
    each side. One that divides neither is told apart when it is loaded.
    """
    rows, columns = (*fact.shape, 1, 1)[:2]
    return Grid((suffix,), max(1, size[0] // max(1, rows)), size[1] // columns if columns > 1 else 0)


class PairsStorage(Storage):
    """Whole numbers from -8 to 7, two in a byte [O, I / 2], the first in the low half; scales and the values that 0
    stands for are [J, O]: ``weight = number * scale + zero``.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def parameters(self, piece: Piece) -> Sequence[ParameterSpec]:
        """See Storage."""
        found = [piece.matrix(NUMBERS, self._dtype, block=(2, 1))]
        for suffix in (SCALE, ZERO):
            shape = piece.shape(suffix) or (1, piece.shard.size)
            found.append(piece.beside(suffix, piece.dtype(suffix, "bfloat16"), shape[:1], transposed=True))
        return [*found, *piece.known(INPUTS, *UNUSED)]

    def decode(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """See Storage."""
        codes = unpack_nibbles(stored[NUMBERS].view(torch.uint8)).to(torch.int8)
        values = torch.where(codes > 7, codes - 16, codes).float()
        columns = piece.column_indices(values.device)
        groups = columns * len(stored[SCALE]) // piece.info.input_size
        scale, zero = (stored[suffix].float().t()[:, groups] for suffix in (SCALE, ZERO))
        values = values * scale + zero
        if INPUTS in stored:
            values = values * stored[INPUTS].float().reshape(-1)[columns]
        return values
