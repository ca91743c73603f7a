"""How compressed-tensors stores matrices, by what its configuration says."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jackfield.interfaces import ParameterSpec
from jackfield_quantization.compressed_tensors import MASK, ZERO, WeightArgs
from jackfield_quantization.scaled import Grid, Nibbles, Numbers, PackedZeros, ScaledStorage, Sixes, Typed, Words
from jackfield_quantization.stored import Piece, PlainStorage, Storage, Stored
from jackfield_quantization.stored_method import PLAIN, unreadable
from jackfield_quantization.unquantized_scheme import WEIGHT

PACKED, SCALE, GLOBAL, ORDER = "weight_packed", "weight_scale", "weight_global_scale", "weight_g_idx"
COMPRESSED, SHAPE = "compressed", "shape"


def storage_of(args: WeightArgs, written: str) -> ScaledStorage | None:
    """Return the storage, or None where nothing reads it."""
    rows, columns = args.block or (1, args.group)
    scale = Grid((SCALE,), rows, columns)
    if args.kind == "float":
        return _floats(args, scale)
    if args.kind != "int" or args.strategy == "tensor_group":
        return None
    if written == "pack-quantized":
        zeros = PackedZeros(ZERO, args.bits, args.group)
        if args.strategy not in ("group", "channel") and not args.symmetric:
            return None
        return ScaledStorage(Words(PACKED, args.bits), scale, zero=None if args.symmetric else zeros, order=ORDER)
    zero = None if args.symmetric else Grid((ZERO,), rows, columns, "int8")
    return ScaledStorage(Typed("int8"), scale, zero=zero, order=ORDER)


def _floats(args: WeightArgs, scale: Grid) -> ScaledStorage | None:
    """Return the storage of floats; their zero is where it is."""
    if not args.symmetric:
        return None
    numbers: Numbers
    if args.bits == 8:
        return ScaledStorage(Typed("float8_e4m3fn"), scale)
    if args.bits == 4 and args.group == 16:
        return ScaledStorage(Nibbles(PACKED), scale, factor=GLOBAL, divides=True)
    if args.bits in (4, 6) and args.group == 32:
        numbers = Nibbles(PACKED) if args.bits == 4 else Sixes(PACKED)
        return ScaledStorage(numbers, scale)
    return None


class SparseStorage(Storage):
    """Two of four neighbouring inputs are 0: the others follow one another [O, I / 2], and a bit for each input, the
    lowest first, says which those are (uint8 [O, I / 8]).

    Args:
        dense: how the matrix would be stored with its zeros; a plain matrix if None.
    """

    def __init__(self, dense: Storage | None) -> None:
        self._dense = dense or PlainStorage()

    def parameters(self, piece: Piece) -> Sequence[ParameterSpec]:
        """See Storage."""
        others = [spec for spec in self._dense.parameters(piece) if spec.suffix != WEIGHT]
        dtype = piece.dtype(COMPRESSED, piece.info.dtype)
        if isinstance(self._dense, PlainStorage) and dtype not in PLAIN:
            detail = f"its weight is stored as {dtype}, but the configuration leaves it alone"
            raise unreadable(piece.info, piece.label, detail, "correct quantization_config in config.json")
        values = piece.matrix(COMPRESSED, dtype, block=(4, 2))
        return [values, piece.matrix(MASK, "uint8", block=(8, 1)), piece.needed(SHAPE, "int64"), *others]

    def decode(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """See Storage."""
        if int(stored[SHAPE].flatten()[-1]) != piece.info.input_size:
            detail = f"its stored shape is {stored[SHAPE].flatten().tolist()}, for {piece.info.input_size} inputs"
            raise unreadable(piece.info, piece.label, detail)
        return self._dense.decode(piece, {**stored, WEIGHT: with_zeros(stored[COMPRESSED], stored[MASK])})


def with_zeros(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the matrix [O, I] of ``values`` [O, I / 2] where the bits of ``mask`` [O, I / 8] are 1."""
    there = ((mask.unsqueeze(-1) >> torch.arange(8, device=mask.device)) & 1).flatten(-2).bool()
    # Bytes can be put anywhere on any device; 8-bit floats cannot.
    narrow = values.element_size() == 1
    raw = values.view(torch.uint8) if narrow else values
    wide = torch.zeros(there.shape, dtype=raw.dtype, device=raw.device).masked_scatter_(there, raw)
    return wide.view(values.dtype)
