"""Matrices as HQQ stores them. Legend: O outputs, I inputs, G numbers of a group, N groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from jackfield.interfaces import ParameterSpec
from jackfield_quantization.hqq import PACKED
from jackfield_quantization.stored import Piece, Storage, Stored
from jackfield_quantization.stored_method import unreadable

SCALE, ZERO, SHAPE, BITS, GROUP, AXIS = "scale", "zero", "shape", "nbits", "group_size", "axis"
PACKING, AS_FLOAT = "packing", "view_as_float"
NEEDED: Mapping[str, str] = {
    PACKED: "uint8",
    SCALE: "float16",
    ZERO: "float16",
    SHAPE: "int64",
    BITS: "int32",
    GROUP: "int32",
    AXIS: "int32",
}
OTHERS = (
    *(PACKING, AS_FLOAT, "unpack_view_dtype", "quant_scale", "quant_zero", "compute_dtype", "offload_meta"),
    *("encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero"),
)
"""Settings of the writer; numbers that are needed twice over, or not at all."""
THREE_BITS_IN_A_WORD = 10


class HqqStorage(Storage):
    """``W_q`` has groups of the flattened matrix as rows (``axis`` 1) or columns (``axis`` 0), packed along its first
    dimension: each byte (for three bits, each word) has numbers that lie equally far apart, the first in the highest
    bits. ``weight = (q - zero) * scale``. Rows of the matrix are no rows of it, so that each rank reads all.
    """

    def parameters(self, piece: Piece) -> Sequence[ParameterSpec]:
        """See Storage."""
        found = [piece.needed(suffix, dtype, opaque=suffix == PACKED) for suffix, dtype in NEEDED.items()]
        return [*found, *piece.known(*OTHERS)]

    def decode(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """See Storage."""
        shape = tuple(stored[SHAPE].tolist())
        if shape != (piece.shard.size, piece.info.input_size):
            detail = f"its stored shape is {list(shape)}, not {[piece.shard.size, piece.info.input_size]}"
            raise unreadable(piece.info, piece.label, detail)
        for suffix in ("quant_scale", "quant_zero"):
            if suffix in stored and bool(stored[suffix].any()):
                raise unreadable(piece.info, piece.label, "its scales or zero points are quantized themselves")
        packed = stored[PACKED]
        if AS_FLOAT in stored and bool(stored[AS_FLOAT].any()):
            packed = packed.view(torch.int32 if int(stored[BITS]) == 3 else torch.uint8)
        group, axis = int(stored[GROUP]), int(stored[AXIS])
        rows = group if axis == 0 else shape[0] * shape[1] // group
        values = unpacked(packed, int(stored[BITS]))[:rows].float()
        wide = ((values - stored[ZERO].float()) * stored[SCALE].float()).reshape(shape)
        (first, last), (start, stop) = piece.rows, piece.columns
        return wide[first:last, start:stop]


def unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return numbers that are packed along the first dimension."""
    count = THREE_BITS_IN_A_WORD if bits == 3 else 8 // bits
    shifts = range(bits * (count - 1), -1, -bits)
    return torch.cat([(packed >> shift) & ((1 << bits) - 1) for shift in shifts])
