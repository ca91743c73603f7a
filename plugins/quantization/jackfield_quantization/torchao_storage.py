"""Matrices as torchao stores them. Legend: O outputs, I inputs, J groups of inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from jackfield.interfaces import ParameterSpec, TensorFacts
from jackfield_quantization.packing import E2M3, E3M2, exponents, unpack_nibbles, unpack_words
from jackfield_quantization.scaled import Codes, Grid, Nibbles, Numbers, ScaledStorage, Typed
from jackfield_quantization.stored import Piece, Storage, Stored
from jackfield_quantization.stored_method import unreadable
from jackfield_quantization.torchao import EXPONENTS, FACTOR, FLOATS, INPUTS, REMEDY, UNUSED, Names

NIBBLES = 8
"""Whole numbers of four bits in a word."""
TILE_ROWS, TILE_COLUMNS = 8, 16
MIDDLE = 8
"""What tiles' numbers are stored with added."""
MX_BLOCK, NVFP4_BLOCK = 32, 16
SIX_BITS = {"fp6_e2m3": E2M3, "fp6_e3m2": E3M2}
"""What torchao calls floats of six bits, which it stores in a byte each."""
WHOLE = frozenset({"int8", "int16", "int32", "int64"})
SWIZZLE_ROWS, SWIZZLE_COLUMNS = 128, 4
"""Blocks' scales that tensor cores of Blackwell take together."""


def grid(suffix: str, fact: TensorFacts, size: tuple[int, int]) -> Grid:
    """Return how numbers belong to blocks of a matrix of ``size`` (O, I): their shape says how many there are along
    each side. One that divides neither is told apart when it is loaded.
    """
    rows, columns = (*fact.shape, 1, 1)[:2]
    return Grid((suffix,), max(1, size[0] // max(1, rows)), size[1] // columns if columns > 1 else 0)


def zeros(suffix: str, fact: TensorFacts, size: tuple[int, int]) -> Grid:
    """Return how zero points are stored; those of a floating type must be whole numbers all the same."""
    made = grid(suffix, fact, size)
    return made if fact.dtype in WHOLE else Whole(made.suffixes, made.rows, made.columns)


@dataclass(frozen=True, slots=True)
class Whole(Grid):
    """Whole numbers in a floating type. Others would be what the middle stands for, which only attributes that are not
    read tell.
    """

    def read(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """See Grid.

        Raises:
            CheckpointError: some are none.
        """
        found = Grid.read(self, piece, stored)
        if not torch.equal(found, found.round()):
            detail = f"{self.suffix(piece)} has zero points that are no whole numbers"
            raise unreadable(piece.info, piece.label, detail, REMEDY)
        return found


def block_scales(suffix: str, fact: TensorFacts, size: tuple[int, int], block: int) -> Grid:
    """Return how scales of blocks of ``block`` inputs are stored, of a matrix of ``size``. Those in the order of tensor
    cores are told by their shape, which no matrix has for those in plain order.
    """
    if fact.shape == swizzled_shape(size[0], size[1] // block):
        return Swizzled((suffix,), 1, block)
    return Grid((suffix,), 1, block)


def swizzled_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of swizzled scales: tiles of 128 by 4 of them are stored as 32 by 16."""
    return -(-rows // SWIZZLE_ROWS) * 32, -(-columns // SWIZZLE_COLUMNS) * 16


def unswizzled(stored: torch.Tensor, columns: int) -> torch.Tensor:
    """Return scales [O, J] in order, padding of O included, out of those in the order that tensor cores read them in.

    Args:
        stored: [T * 32, U * 16]; a tile of 128 outputs and 4 blocks lies in 512 that follow one another, and the scale
            of output ``32 a + r`` and block ``c`` is number ``16 r + 4 a + c`` of them. columns: J.

    Source: "1D Block Scaling Factors Layout" of cuBLAS' documentation.
    """
    tiles = stored.shape[0] // 32
    flat = stored.reshape(tiles, -1, 32, 4, SWIZZLE_COLUMNS)
    return flat.permute(0, 3, 2, 1, 4).reshape(tiles * SWIZZLE_ROWS, -1)[:, :columns]


@dataclass(frozen=True, slots=True)
class Swizzled(Grid):
    """Scales of blocks of inputs in the order that tensor cores read them in, padded to whole tiles."""

    in_order: ClassVar[bool] = False

    def parameter(self, piece: Piece) -> ParameterSpec:
        """Return how they are stored: cut with the matrix where tiles allow that, else whole on each rank."""
        suffix = self.suffix(piece)
        dtype = piece.dtype(suffix, self.default)
        shape = swizzled_shape(piece.shard.size, piece.info.input_size // self.columns)
        if piece.has_whole(SWIZZLE_ROWS):
            return piece.beside(suffix, dtype, shape[1:], pack=SWIZZLE_ROWS // 32)
        return piece.whole(suffix, dtype, shape, opaque=True)

    def read(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """See Grid."""
        found = stored[self.suffix(piece)]
        # Bytes can be put into another order on any device; not all types of eight bits can.
        order = unswizzled(found.view(torch.uint8), piece.info.input_size // self.columns)
        return exponents(piece.own_rows(order).contiguous().view(found.dtype))


class PairsStorage(Storage):
    """Whole numbers of four bits, the first in the low bits; scales and what 0 stands for are [J, O].

    Args:
        names: of the tensors. dtype: that two numbers (int8, uint8: [O, I / 2]) or eight (int32: [O, I / 8]) are stored
            in. Pairs are from -8 to 7, and ``weight = number * scale + zero``; eights are from 0 to 15, and ``(number -
            zero) * scale``.
    """

    def __init__(self, names: Names, dtype: str) -> None:
        self._names, self._dtype = names, dtype

    def parameters(self, piece: Piece) -> Sequence[ParameterSpec]:
        """See Storage."""
        block = NIBBLES if self._dtype == "int32" else 2
        found = [piece.matrix(self._names.numbers, self._dtype, block=(block, 1))]
        for suffix in (self._names.scale, self._names.zero):
            shape = piece.shape(suffix) or (1, piece.shard.size)
            found.append(piece.beside(suffix, piece.dtype(suffix, "bfloat16"), shape[:1], transposed=True))
        return [*found, *piece.known(INPUTS, *UNUSED)]

    def decode(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """See Storage."""
        names, packed = self._names, stored[self._names.numbers]
        columns = piece.column_indices(packed.device)
        groups = columns * len(stored[names.scale]) // piece.info.input_size
        scale, zero = (stored[suffix].float().t()[:, groups] for suffix in (names.scale, names.zero))
        if self._dtype == "int32":
            values = (unpack_words(packed, 4) - zero) * scale
        else:
            codes = unpack_nibbles(packed.view(torch.uint8)).to(torch.int8)
            values = torch.where(codes > 7, codes - 16, codes).float() * scale + zero
        return scaled_inputs(values, stored, columns)


class TilesStorage(Storage):
    """Whole numbers of four bits in tiles that a warp's threads read, and for each output and group a pair of a scale
    and of what the middle stands for: ``weight = (number - 8) * scale + zero``. Inputs, and outputs where they are no
    whole tiles, are padded.

    Args:
        names: of the tensors. columns: inputs of a group.

    Source: ``matrix_to_m16n8k16_Bint4_layout`` of PyTorch (aten/src/ATen/native/cuda/int4mm.cu): numbers are int32 [O
    / 8, I / (16 inner), 32, inner / 2], where ``inner`` tiles of 16 inputs lie together.
    """

    def __init__(self, names: Names, columns: int) -> None:
        self._names, self._columns = names, columns

    def parameters(self, piece: Piece) -> Sequence[ParameterSpec]:
        """See Storage."""
        first, second = self._names.numbers, self._names.both
        tiles, pairs = piece.shape(first), piece.shape(second)
        assert tiles is not None, "a form that its tensors tell"
        assert pairs is not None, "a form that its tensors tell"
        dtype = piece.dtype(second, "bfloat16")
        if piece.has_whole(TILE_ROWS):
            numbers = piece.beside(first, "int32", tiles[1:], pack=TILE_ROWS)
            found = [numbers, piece.beside(second, dtype, pairs[:1], transposed=True, rest=(2,))]
        else:
            found = [piece.whole(first, "int32", tiles, opaque=True), piece.whole(second, dtype, pairs, opaque=True)]
        return [*found, *piece.known(INPUTS, *UNUSED)]

    def decode(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """See Storage."""
        values = piece.own_rows(untiled(stored[self._names.numbers]))
        columns = piece.column_indices(values.device)
        pairs_OJ2 = piece.own_rows(stored[self._names.both].float(), 1).transpose(0, 1)[:, columns // self._columns]
        wide = (values[:, columns] - MIDDLE).float() * pairs_OJ2[..., 0] + pairs_OJ2[..., 1]
        return scaled_inputs(wide, stored, columns)


def tiles_storage(names: Names, facts: Mapping[str, TensorFacts], inputs: int) -> TilesStorage | None:
    """Return the storage of tiles of a matrix with ``inputs``, or None where types and shapes are not theirs."""
    tiles, pairs = facts[names.numbers].shape, facts[names.both].shape
    if (
        facts[names.numbers].dtype != "int32"
        or len(tiles) != 4
        or tiles[2] != 32
        or len(pairs) != 3
        or pairs[2] != 2
        or not pairs[0]
    ):
        return None
    rows, columns = tiles[0] * TILE_ROWS, tiles[1] * tiles[3] * 2 * TILE_COLUMNS
    fits = rows == pairs[1] and inputs <= columns and not columns % pairs[0]
    return TilesStorage(names, columns // pairs[0]) if fits else None


def untiled(tiles: torch.Tensor) -> torch.Tensor:
    """Return numbers from 0 to 15 [O, I], padding included, out of tiles; see :class:`TilesStorage`.

    Thread ``4 n + c`` of a tile has output ``n``. Nibble ``4 q + 2 s + h`` of its word ``j`` is of input ``32 j + 16 s
    + 8 h + 2 c + q``.
    """
    split = torch.unflatten(unpack_words(tiles, 4), -1, (-1, 2, 2, 2))
    parts = torch.unflatten(split, 2, (TILE_ROWS, 4))
    # [O / 8, I / (16 inner), n, c, j, q, s, h] to [O / 8, n, I / (16 inner), j, s, h, c, q]
    return parts.permute(0, 2, 1, 4, 6, 7, 3, 5).flatten(2).flatten(0, 1)


def scaled_inputs(values: torch.Tensor, stored: Stored, columns: torch.Tensor) -> torch.Tensor:
    """Return the matrix with what activations are to be multiplied by, where there is that."""
    return values * stored[INPUTS].float().reshape(-1)[columns] if INPUTS in stored else values


def storage_of(names: Names, facts: Mapping[str, TensorFacts], inputs: int, words: str) -> Storage | None:
    """Return how a matrix with ``inputs`` is stored, or None where nothing reads it.

    Args:
        names, facts: of its tensors, of which two are numbers and scales. words: of the configuration, which says what
            six bits mean.
    """
    numbers = facts[names.numbers]
    if names.both in facts:
        return tiles_storage(names, facts, inputs)
    if len(numbers.shape) != 2:
        return None
    scale, zero = facts[names.scale], facts.get(names.zero)
    match numbers.dtype, inputs / numbers.shape[1]:
        case "int32", 8 if zero is not None and zero.dtype in WHOLE:
            return PairsStorage(names, numbers.dtype)
        case "int8" | "uint8", 2 if zero is not None:
            return PairsStorage(names, numbers.dtype)
        case "uint8", 2:
            return microscaled_storage(names, Nibbles(names.numbers), facts, inputs)
        case "uint8", 1 if zero is None and (table := six_bits(words)) is not None:
            return microscaled_storage(names, Codes(names.numbers, table), facts, inputs)
        case dtype, 1 if dtype in FLOATS and scale.dtype in EXPONENTS:
            return microscaled_storage(names, Typed(dtype, names.numbers), facts, inputs)
        case dtype, 1 if dtype in {"int8", *FLOATS}:
            size = (numbers.shape[0], inputs)
            points = None if zero is None else zeros(names.zero, zero, size)
            typed, factors = Typed(dtype, names.numbers), grid(names.scale, scale, size)
            return ScaledStorage(typed, factors, zero=points, inputs=INPUTS, unused=UNUSED)
    return None


def microscaled_storage(
    names: Names, numbers: Numbers, facts: Mapping[str, TensorFacts], inputs: int
) -> ScaledStorage | None:
    """Return the storage of floats in blocks with a scale, which is an exponent (MX) or a float of eight bits (NVFP4),
    and perhaps one more for the whole matrix.
    """
    scale, rows = facts[names.scale], facts[names.numbers].shape[0]
    block = {"float8_e8m0fnu": MX_BLOCK, "uint8": MX_BLOCK, "float8_e4m3fn": NVFP4_BLOCK}.get(scale.dtype)
    if block is None or inputs % block:
        return None
    factor = FACTOR if FACTOR in facts else ""
    scales = block_scales(names.scale, scale, (rows, inputs), block)
    return ScaledStorage(numbers, scales, factor=factor, inputs=INPUTS, unused=UNUSED)


def six_bits(words: str) -> tuple[float, ...] | None:
    """Return the one table that a configuration names, or None where it names none or several."""
    named = [table for word, table in SIX_BITS.items() if word in words]
    return named[0] if len(named) == 1 else None
