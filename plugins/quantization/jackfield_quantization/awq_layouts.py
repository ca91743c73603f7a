"""Matrices of four bits in the orders of kernels that came after AWQ's first: ``gemv``, ``gemv_fast`` and Marlin's.

Legend: O outputs, I inputs, J groups of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jackfield.interfaces import ParameterSpec
from jackfield_quantization.gptq import QWEIGHT
from jackfield_quantization.gptq_storage import FOUR_BITS, HALF, SCALES, ZEROS
from jackfield_quantization.packing import unpack_words
from jackfield_quantization.stored import Integers, Piece, Storage, Stored, wide
from jackfield_quantization.stored_method import unreadable

TILE, LANES = 16, 64
"""Inputs, and outputs, of a tile of Marlin's; and outputs of the four whose numbers are mixed."""
MARLIN_NAMES = ("B", "s")
"""What the first checkpoints of Marlin's call numbers and scales."""


class AwqRowsStorage(Storage):
    """Version ``gemv``: ``qweight`` int32 [O, I / 8] and ``qzeros`` int32 [O, J / 8] in plain order, and ``scales`` [O,
    J]; the last two are padded along groups. ``weight = (q - zero) * scale``.

    Args:
        group: inputs that share scale and zero, or 0 for all.
    """

    def __init__(self, group: int) -> None:
        self._group = group

    def parameters(self, piece: Piece) -> Sequence[ParameterSpec]:
        """See Storage."""
        groups = -(-piece.info.input_size // (self._group or piece.info.input_size))
        width = -(-groups // 8)
        zeros, scales = piece.shape(ZEROS) or (0, width), piece.shape(SCALES) or (0, 8 * width)
        return [
            piece.matrix(QWEIGHT, "int32", block=(8, 1)),
            piece.beside(ZEROS, "int32", zeros[1:]),
            piece.beside(SCALES, piece.dtype(SCALES, "float16"), scales[1:]),
        ]

    def decode(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """See Storage."""
        return wide(self.integers(piece, stored))

    def four_bit_group(self, piece: Piece) -> int | None:
        """See Storage."""
        return self._group or piece.info.input_size

    def integers(self, piece: Piece, stored: Stored) -> Integers:
        """See Storage."""
        values_OI = unpack_words(stored[QWEIGHT], FOUR_BITS)
        groups_I = piece.column_indices(values_OI.device) // (self._group or piece.info.input_size)
        values_OI -= unpack_words(stored[ZEROS], FOUR_BITS)[:, groups_I]
        return Integers(values_OI, stored[SCALES].float(), groups_I)


class AwqFastStorage(Storage):
    """Version ``gemv_fast``, which llm-awq writes too: ``qweight`` int16 [O / 4, I], ``scales`` and ``qzeros`` [J, O],
    the latter being products of scales and zero points below 0; groups are padded. ``weight = q * scale + zero``.

    Args:
        group: inputs that share scale and zero, or 0 for all.
    """

    def __init__(self, group: int) -> None:
        self._group = group

    def parameters(self, piece: Piece) -> Sequence[ParameterSpec]:
        """See Storage."""
        found = [piece.beside(QWEIGHT, "int16", (piece.info.input_size,), pack=4)]
        for suffix in (SCALES, ZEROS):
            groups = (piece.shape(suffix) or (1,))[:1]
            found.append(piece.beside(suffix, piece.dtype(suffix, "float16"), groups, transposed=True))
        return found

    def decode(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """See Storage."""
        values = fast_rows(stored[QWEIGHT])
        columns = piece.column_indices(values.device)
        groups = columns // (self._group or piece.info.input_size)
        scale, zero = (stored[suffix].float().t()[:, groups] for suffix in (SCALES, ZEROS))
        return values[:, columns].float() * scale + zero


def fast_rows(stored: torch.Tensor) -> torch.Tensor:
    """Return numbers [O, I] out of int16 [O / 4, I]: of 64 neighbouring inputs, four rows follow one another, four
    numbers to a word. Of 32 inputs, number ``8 b + 4 h + a`` is of input ``8 a + 2 b + h``.
    """
    nibbles = (stored.int().unsqueeze(-1) >> torch.arange(0, 16, 4, device=stored.device)) & 15
    rows = torch.unflatten(nibbles.flatten(1), 1, (-1, 4, 64)).transpose(1, 2).flatten(2).flatten(0, 1)
    thirds = torch.unflatten(rows, 1, (-1, 4, 2, 4))
    # [O, I / 32, b, h, a] to [O, I / 32, a, b, h]
    return thirds.permute(0, 1, 4, 2, 3).flatten(1)


class MarlinStorage(Storage):
    """Marlin's own files: numbers int32 [I / 16, 2 O] in tiles, and scales [J, O], both in the order that tensor cores
    take them in. ``weight = (q - 8) * scale``.

    Args:
        group: inputs that share a scale, or 0 for all. names: suffixes of numbers and scales.
    """

    def __init__(self, group: int, names: tuple[str, str] = (QWEIGHT, SCALES)) -> None:
        self._group, self._names = group, names

    def parameters(self, piece: Piece) -> Sequence[ParameterSpec]:
        """See Storage. Outputs follow one another no more, so that each rank reads all."""
        outputs, inputs = piece.shard.size, piece.info.input_size
        if outputs % LANES or inputs % TILE:
            detail = f"[{outputs}, {inputs}] is not made of Marlin's tiles of {LANES} outputs by {TILE} inputs"
            raise unreadable(piece.info, piece.label, detail)
        numbers, scales = self._names
        return [
            piece.whole(numbers, "int32", (inputs // TILE, 2 * outputs), opaque=True),
            piece.whole(scales, piece.dtype(scales, "float16"), (self._groups(piece), outputs), opaque=True),
            *piece.known("workspace"),
        ]

    def decode(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """See Storage."""
        return wide(self.integers(piece, stored))

    def four_bit_group(self, piece: Piece) -> int | None:
        """See Storage."""
        return self._group or piece.info.input_size

    def integers(self, piece: Piece, stored: Stored) -> Integers:
        """See Storage."""
        numbers, scales = self._names
        columns = piece.column_indices(stored[numbers].device)
        values_OI = piece.own_rows(marlin_tiles(stored[numbers]).t())[:, columns] - HALF
        scales_OJ = marlin_scales(stored[scales].float(), grouped=self._groups(piece) > 1).t()
        return Integers(values_OI, piece.own_rows(scales_OJ), columns // (self._group or piece.info.input_size))

    def _groups(self, piece: Piece) -> int:
        return -(-piece.info.input_size // (self._group or piece.info.input_size))


def marlin_order() -> list[int]:
    """Return where each of 1024 stored numbers lies in four tiles of 16 inputs by 16 outputs, one after another.

    A thread ``t`` of a warp has eight numbers of each tile: of the inputs ``2 (t % 4)`` and the three that lie 1, 8 and
    9 behind, of the outputs ``t // 4`` and the eighth behind. Numbers of a word are in the order of unpacking: those of
    even places first.
    """
    steps = [(row, 8 * block) for block in (0, 1) for row in (0, 1, 8, 9)]
    places = [steps[at] for at in (0, 2, 4, 6, 1, 3, 5, 7)]
    return [
        256 * tile + TILE * (2 * (thread % 4) + row) + thread // 4 + column
        for thread in range(32)
        for tile in range(4)
        for row, column in places
    ]


def marlin_tiles(stored: torch.Tensor) -> torch.Tensor:
    """Return numbers from 0 to 15 [I, O] out of int32 [I / 16, 2 O].

    Source: the packing of IST-DASLab's ``marlin``, which AutoGPTQ and AutoAWQ have taken over.
    """
    lanes = torch.unflatten(unpack_words(stored, FOUR_BITS), 1, (-1, TILE * LANES))
    order = torch.tensor(marlin_order(), device=stored.device)
    found = torch.empty_like(lanes)
    found[..., order] = lanes
    # [I / 16, O / 16, 16 inputs, 16 outputs] to [I / 16, 16 inputs, O / 16, 16 outputs]
    return torch.unflatten(found.flatten(1), 1, (-1, TILE, TILE)).transpose(1, 2).flatten(2).flatten(0, 1)


def marlin_scales(stored: torch.Tensor, *, grouped: bool) -> torch.Tensor:
    """Return scales [J, O] in order: those of 64 outputs lie across, or of 32 where each output has but one."""
    if grouped:
        return torch.unflatten(stored, 1, (-1, 8, 8)).transpose(2, 3).flatten(1)
    return torch.unflatten(stored, 1, (-1, 4, 4, 2)).transpose(2, 3).flatten(1)
