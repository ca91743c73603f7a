"""Matrices as GPTQ and AWQ store them: whole numbers in 32-bit words, inputs first. Legend: O outputs, I inputs, J
groups of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jackfield.interfaces import ParameterSpec
from jackfield_quantization.gptq import QWEIGHT, GptqSpec
from jackfield_quantization.packing import AWQ_ORDER, WORD, unpack_words
from jackfield_quantization.scaled import UNUSED, packed_unit
from jackfield_quantization.stored import Integers, Piece, Storage, Stored, wide
from jackfield_quantization.stored_method import unreadable

FOUR_BITS, HALF = 4, 8
"""Bits of a number, and half of what they span."""
ZEROS, SCALES, ORDER = "qzeros", "scales", "g_idx"


class GptqStorage(Storage):
    """``qweight`` int32 [I / n, O], ``qzeros`` int32 [J, O / n], ``scales`` [J, O], ``g_idx`` int32 [I]: the group of
    each input. ``weight = (q - zero) * scale``.
    """

    def __init__(self, spec: GptqSpec) -> None:
        self._spec = spec

    def parameters(self, piece: Piece) -> Sequence[ParameterSpec]:
        """See Storage."""
        numbers, words = packed_unit(self._spec.bits)
        groups = self._groups(piece)
        found = [
            piece.matrix(QWEIGHT, "int32", block=(numbers, words), transposed=True),
            piece.beside(SCALES, piece.dtype(SCALES, "float16"), (groups,), transposed=True),
            self._zeros(piece, groups, numbers, words),
        ]
        if ORDER in piece.facts or self._spec.reordered:
            found.append(piece.whole(ORDER, "int32", (piece.info.input_size,)))
        return found

    def decode(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """See Storage."""
        return wide(self.integers(piece, stored))

    def four_bit_group(self, piece: Piece) -> int | None:
        """See Storage."""
        fits = self._spec.bits == FOUR_BITS and not self._spec.reordered
        return (self._spec.group or piece.info.input_size) if fits else None

    def integers(self, piece: Piece, stored: Stored) -> Integers:
        """See Storage."""
        values_IO = unpack_words(stored[QWEIGHT], self._spec.bits, 0)
        groups_I = self._group_of_columns(piece, stored, values_IO.device)
        zeros_JO = self._decode_zeros(piece, stored[ZEROS])
        return Integers((values_IO - zeros_JO[groups_I]).t(), stored[SCALES].float().t(), groups_I)

    def _decode_zeros(self, piece: Piece, zeros: torch.Tensor) -> torch.Tensor:
        values = piece.own_rows(unpack_words(zeros, self._spec.bits), 1)
        # Stored less one, a zero point of 0 wraps to the largest number.
        return (values + self._spec.zeros_plus) & ((1 << self._spec.bits) - 1)

    def _groups(self, piece: Piece) -> int:
        group = self._spec.group or piece.info.input_size
        return -(-piece.info.input_size // group)

    def _zeros(self, piece: Piece, groups: int, numbers: int, words: int) -> ParameterSpec:
        """Return zero points: cut with the matrix where words allow that, else whole on each rank."""
        shape = piece.shape(ZEROS)
        if shape is not None and shape == piece.shape(SCALES):
            raise unreadable(piece.info, piece.label, "its zero points (qzeros) are not packed", "pack the model again")
        if words == 1 and piece.has_whole(numbers):
            return piece.beside(ZEROS, "int32", (groups,), pack=numbers, transposed=True)
        words = -(-piece.shard.size * self._spec.bits // WORD)
        return piece.whole(ZEROS, "int32", (groups, words), opaque=True)

    def _group_of_columns(self, piece: Piece, stored: Stored, device: torch.device) -> torch.Tensor:
        start, stop = piece.columns
        if ORDER in stored:
            groups = stored[ORDER][start:stop].long()
            if bool((groups < 0).any()) or bool((groups >= self._groups(piece)).any()):
                raise unreadable(piece.info, piece.label, "g_idx names groups that there are not")
            return groups
        columns = torch.arange(start, stop, device=device)
        return columns // (self._spec.group or piece.info.input_size)


class AwqStorage(Storage):
    """Numbers int32 [I, O / 8] and zero points int32 [J, O / 8] of four bits, both with columns of a word out of order,
    and scales [J, O] (AWQ's ``gemm`` version). ``weight = (q - zero) * scale``.

    Args:
        group: inputs that share scale and zero, or 0 for all. zeros: whether there are zero points. names: suffixes of
            numbers, zero points and scales. order: place in its word of each column. signed: whether numbers are from
            -8 to 7.
    """

    def __init__(
        self,
        group: int,
        *,
        zeros: bool = True,
        names: tuple[str, str, str] = (QWEIGHT, ZEROS, SCALES),
        order: Sequence[int] = AWQ_ORDER,
        signed: bool = False,
    ) -> None:
        self._group, self._has_zeros, self._names, self._order = group, zeros, names, order
        # With its highest bit turned, a number that has a sign is the same one plus 8.
        self._turned = HALF if signed else 0

    def parameters(self, piece: Piece) -> Sequence[ParameterSpec]:
        """See Storage."""
        numbers, zeros, scales = self._names
        groups = -(-piece.info.input_size // (self._group or piece.info.input_size))
        found = [
            piece.matrix(numbers, "int32", pack=8, transposed=True),
            piece.beside(scales, piece.dtype(scales, "float16"), (groups,), transposed=True),
        ]
        if self._has_zeros or zeros in piece.facts:
            found.append(piece.beside(zeros, "int32", (groups,), pack=8, transposed=True))
        return [*found, *piece.known(*UNUSED)]

    def decode(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """See Storage."""
        return wide(self.integers(piece, stored))

    def four_bit_group(self, piece: Piece) -> int | None:
        """See Storage."""
        return self._group or piece.info.input_size

    def integers(self, piece: Piece, stored: Stored) -> Integers:
        """See Storage."""
        numbers, zeros, scales = self._names
        values_IO = self._unpacked(stored[numbers])
        groups_I = piece.column_indices(values_IO.device) // (self._group or piece.info.input_size)
        values_IO -= self._unpacked(stored[zeros])[groups_I] if zeros in stored else HALF
        return Integers(values_IO.t(), stored[scales].float().t(), groups_I)

    def _unpacked(self, words: torch.Tensor) -> torch.Tensor:
        return unpack_words(words, FOUR_BITS, order=self._order) ^ self._turned
