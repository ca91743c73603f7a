"""Matrices stored outputs first, as numbers with scales: what most formats are. ``weight = (number - zero) * scale``.

Legend: O outputs, I inputs, J groups of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from jackfield.interfaces import ParameterSpec
from jackfield_quantization.packing import E2M1, E2M3, WORD, exponents, from_table, unpack_nibbles, unpack_words
from jackfield_quantization.stored import Integers, Piece, Storage, Stored
from jackfield_quantization.stored_method import unreadable
from jackfield_quantization.unquantized_scheme import WEIGHT

UNUSED = (
    "input_scale",
    "input_scale_ub",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "output_zero_point",
    "weight_shape",
)
"""Tensors about activations, which stay as they are, and about sizes that the model knows."""


def packed_unit(bits: int) -> tuple[int, int]:
    """Return (numbers, words) of the least whole words that hold whole numbers."""
    return (WORD // bits, 1) if WORD % bits == 0 else (WORD, bits)


class Numbers:
    """The stored numbers of a matrix; ``suffix`` is of their tensor."""

    suffix: str

    def parameter(self, piece: Piece) -> ParameterSpec:
        """Return how they are stored."""
        raise NotImplementedError

    def decode(self, piece: Piece, stored: torch.Tensor) -> torch.Tensor:
        """Return float32 numbers [O, I]."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Typed(Numbers):
    """Numbers of a type that torch has: [O, I]. ``default`` is that where nothing is known."""

    default: str
    suffix: str = WEIGHT

    def parameter(self, piece: Piece) -> ParameterSpec:
        """See Numbers."""
        return piece.matrix(self.suffix, piece.dtype(self.suffix, self.default))

    def decode(self, piece: Piece, stored: torch.Tensor) -> torch.Tensor:
        """See Numbers."""
        return stored.float()


@dataclass(frozen=True, slots=True)
class Words(Numbers):
    """Whole numbers of a few bits, a stream in int32 words [O, I * bits / 32], plus half their range."""

    suffix: str
    bits: int

    def parameter(self, piece: Piece) -> ParameterSpec:
        """See Numbers."""
        inputs = piece.info.input_size
        if piece.columns == (0, inputs):
            return piece.beside(self.suffix, "int32", (-(-inputs * self.bits // WORD),))
        return piece.matrix(self.suffix, "int32", block=packed_unit(self.bits))

    def decode(self, piece: Piece, stored: torch.Tensor) -> torch.Tensor:
        """See Numbers."""
        return (unpack_words(stored, self.bits)[..., : piece.size[1]] - (1 << (self.bits - 1))).float()


@dataclass(frozen=True, slots=True)
class Nibbles(Numbers):
    """Four-bit floats (E2M1), two in a byte [O, I / 2], the first in the low half."""

    suffix: str

    def parameter(self, piece: Piece) -> ParameterSpec:
        """See Numbers."""
        return piece.matrix(self.suffix, "uint8", block=(2, 1))

    def decode(self, piece: Piece, stored: torch.Tensor) -> torch.Tensor:
        """See Numbers."""
        return from_table(unpack_nibbles(stored), E2M1)


@dataclass(frozen=True, slots=True)
class RowPairs(Numbers):
    """Whole numbers from -8 to 7 of two neighbouring outputs in a byte [O / 2, I], the first in the low half."""

    suffix: str

    def parameter(self, piece: Piece) -> ParameterSpec:
        """See Numbers."""
        return piece.matrix(self.suffix, "uint8", pack=2)

    def decode(self, piece: Piece, stored: torch.Tensor) -> torch.Tensor:
        """See Numbers."""
        rows = torch.stack((stored & 15, stored >> 4), 1).flatten(0, 1)
        return (rows.float() + 8) % 16 - 8


@dataclass(frozen=True, slots=True)
class Codes(Numbers):
    """Numbers of a table, each in a byte of its own: uint8 [O, I]."""

    suffix: str
    table: tuple[float, ...]

    def parameter(self, piece: Piece) -> ParameterSpec:
        """See Numbers."""
        return piece.matrix(self.suffix, "uint8")

    def decode(self, piece: Piece, stored: torch.Tensor) -> torch.Tensor:
        """See Numbers."""
        return from_table(stored, self.table)


@dataclass(frozen=True, slots=True)
class Sixes(Numbers):
    """Six-bit floats of a table, four in three bytes [O, I * 3 / 4], a stream with the lowest bits first."""

    suffix: str
    table: tuple[float, ...] = E2M3

    def parameter(self, piece: Piece) -> ParameterSpec:
        """See Numbers."""
        return piece.matrix(self.suffix, "uint8", block=(4, 3))

    def decode(self, piece: Piece, stored: torch.Tensor) -> torch.Tensor:
        """See Numbers."""
        threes = torch.unflatten(stored.int(), -1, (-1, 3))
        words = threes[..., 0] | threes[..., 1] << 8 | threes[..., 2] << 16
        shifts = torch.arange(0, 24, 6, device=stored.device)
        return from_table(((words.unsqueeze(-1) >> shifts) & 63).flatten(-2), self.table)


@dataclass(frozen=True, slots=True)
class Grid:
    """Numbers that belong to blocks of a matrix.

    Args:
        suffixes: of the tensor; checkpoints have one of them. rows, columns: outputs and inputs of a block; 0 columns
            stand for all. A tensor of one number is for the whole matrix, whatever is said here. default: type where
            nothing is known.
    """

    suffixes: tuple[str, ...]
    rows: int = 1
    columns: int = 0
    default: str = "float32"
    in_order: ClassVar[bool] = True
    """Whether blocks lie as they do in the matrix."""

    def suffix(self, piece: Piece) -> str:
        """Return the one that the checkpoint has."""
        return next((name for name in self.suffixes if name in piece.facts), self.suffixes[0])

    def parameter(self, piece: Piece) -> ParameterSpec:
        """Return how they are stored.

        Raises:
            CheckpointError: in another shape than the configuration says.
        """
        suffix = self.suffix(piece)
        dtype, shape = piece.dtype(suffix, self.default), piece.shape(suffix)
        if shape is not None and math.prod(shape) == 1:
            return piece.whole(suffix, dtype, shape)
        groups = -(-piece.info.input_size // self.columns) if self.columns else 1
        if shape is not None and math.prod(shape[1:]) != groups:
            size = f"{self.rows} outputs and {self.columns or 'all'} inputs"
            detail = f"'{suffix}' has the shape {list(shape)}, which is not one number for each block of {size}"
            raise unreadable(piece.info, piece.label, detail, "correct quantization_config in config.json")
        return piece.beside(suffix, dtype, (1,) if shape is None else shape[1:], repeat=self.rows)

    def read(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """Return float32 [O, J], J being 1 or the blocks of all inputs."""
        found = exponents(stored[self.suffix(piece)])
        if found.numel() == 1:
            found = found.reshape(1, 1)
        return found.reshape(found.shape[0], -1).expand(piece.size[0], -1)


@dataclass(frozen=True, slots=True)
class PackedZeros:
    """Zero points packed along outputs: int32 [O * bits / 32, J], plus half their range."""

    suffix: str
    bits: int
    columns: int

    def parameter(self, piece: Piece) -> ParameterSpec:
        """Return how they are stored: cut with the matrix where words allow that, else whole on each rank."""
        groups = -(-piece.info.input_size // self.columns) if self.columns else 1
        numbers, words = packed_unit(self.bits)
        if words == 1 and piece.has_whole(numbers):
            return piece.beside(self.suffix, "int32", (groups,), pack=numbers)
        return piece.whole(self.suffix, "int32", (-(-piece.shard.size * self.bits // WORD), groups), opaque=True)

    def read(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """Return float32 [O, J]."""
        values = unpack_words(stored[self.suffix], self.bits, 0)
        return (piece.own_rows(values) - (1 << (self.bits - 1))).float()


class ScaledStorage(Storage):
    """Numbers with scales.

    Args:
        numbers: of the matrix. scale: what they are multiplied by. zero: what is taken from them before. factor: suffix
            of one more number for the whole matrix, or ``""``. divides: whether the factor divides scales. constant:
            one more factor. order: suffix of the group of each input (int32 [I]), where groups are of inputs in another
            order; used where the checkpoint has it. inputs: suffix of a factor of each input that activations are to be
            multiplied by ([I]); used where the checkpoint has it. unused: further tensors that nothing needs.
    """

    def __init__(
        self,
        numbers: Numbers,
        scale: Grid,
        *,
        zero: Grid | PackedZeros | None = None,
        factor: str = "",
        divides: bool = False,
        constant: float = 1.0,
        order: str = "",
        inputs: str = "",
        unused: tuple[str, ...] = (),
    ) -> None:
        self.numbers, self.scale = numbers, scale
        self._zero, self.factor, self._divides, self._constant = zero, factor, divides, constant
        self._order, self._inputs, self._unused = order, inputs, unused

    def parameters(self, piece: Piece) -> Sequence[ParameterSpec]:
        """See Storage."""
        found = [self.numbers.parameter(piece), self.scale.parameter(piece)]
        if self._zero is not None:
            found.append(self._zero.parameter(piece))
        if self.factor:
            found.append(piece.needed(self.factor, "float32"))
        return [*found, *piece.known(self._order, self._inputs, *UNUSED, *self._unused)]

    def decode(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """See Storage."""
        values = self.numbers.decode(piece, stored[self.numbers.suffix])
        columns = piece.column_indices(values.device)
        groups = self._groups(stored, columns)
        if self._zero is not None:
            values = values - _spread(self._zero.read(piece, stored), groups)
        values = values * _spread(self.row_scales(piece, stored), groups)
        if self._inputs in stored:
            values = values * stored[self._inputs].float().reshape(-1)[columns]
        return values

    def four_bit_group(self, piece: Piece) -> int | None:
        """See Storage."""
        if not isinstance(self.numbers, Words) or self.numbers.bits != 4 or self._order in piece.facts:
            return None
        return self.scale.columns or piece.info.input_size

    def integers(self, piece: Piece, stored: Stored) -> Integers | None:
        """See Storage."""
        whole = isinstance(self.numbers, Words) or stored[self.numbers.suffix].dtype == torch.int8
        if not whole or self._inputs in stored:
            return None
        values = self.numbers.decode(piece, stored[self.numbers.suffix])
        columns = piece.column_indices(values.device)
        groups = self._groups(stored, columns)
        if self._zero is not None:
            values = values - _spread(self._zero.read(piece, stored), groups)
        scales = self.row_scales(piece, stored)
        if groups is None or scales.shape[1] == 1:
            groups = torch.zeros_like(columns)
        return Integers(values.int(), scales, groups)

    def is_plain(self, piece: Piece) -> bool:
        """Return whether numbers times :meth:`row_scales` are all that there is to a matrix of the checkpoint."""
        return self._zero is None and not {self._order, self._inputs} & piece.facts.keys()

    def row_scales(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """Return float32 [O, J], the factor included; J is 1 or the blocks of all inputs."""
        scales = self.scale.read(piece, stored)
        if self.factor:
            factor = stored[self.factor].float().reshape(())
            scales = scales / factor if self._divides else scales * factor
        return scales if self._constant == 1.0 else scales * self._constant

    def _groups(self, stored: Stored, columns: torch.Tensor) -> torch.Tensor | None:
        """Return the group of each input, or None where one scale is for all."""
        if not self.scale.columns:
            return None
        if self._order in stored:
            return stored[self._order].long()[columns]
        return columns // self.scale.columns


def _spread(numbers: torch.Tensor, groups: torch.Tensor | None) -> torch.Tensor:
    return numbers if numbers.shape[-1] == 1 or groups is None else numbers[:, groups]
