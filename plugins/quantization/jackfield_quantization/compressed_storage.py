"""How compressed-tensors stores matrices, by what its configuration says."""

from __future__ import annotations

from jackfield_quantization.compressed_tensors import WeightArgs
from jackfield_quantization.scaled import Grid, Nibbles, Numbers, PackedZeros, ScaledStorage, Sixes, Typed, Words

PACKED, SCALE, ZERO, GLOBAL, ORDER = (
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_global_scale",
    "weight_g_idx",
)


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
