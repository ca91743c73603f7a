"""Matrices in 8-bit floats. Legend: O outputs, I inputs, X experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from jackfield.interfaces import LayerInfo, ParameterHolder
from jackfield_quantization.scaled import Grid, ScaledStorage, Typed
from jackfield_quantization.stored import DecodedScheme, Piece, Storage, stored_of
from jackfield_quantization.unquantized_scheme import WEIGHT

SCALE, INVERSE = "weight_scale", "weight_scale_inv"
"""Both are factors on the stored numbers; the second word stands for blocks (DeepSeek-V3)."""
NARROW = "float8_e4m3fn"


def fp8_storage(block: tuple[int, int] | None) -> ScaledStorage:
    """Return the storage of ``weight`` [O, I] in an 8-bit float type with a scale: one number, one for each output, or
    one for each block of (outputs, inputs).
    """
    rows, columns = block or (1, 0)
    return ScaledStorage(Typed(NARROW), Grid((INVERSE, SCALE) if block else (SCALE, INVERSE), rows, columns))


class Fp8StoredExperts(DecodedScheme):
    """Experts that stay in 8-bit floats; scales are repeated where a cut goes through a block."""

    layout: ClassVar[str] = "fp8"
    becomes_dense: ClassVar[bool] = False

    def finalize(self, layer: ParameterHolder) -> None:
        """Stack the shards, and their scales, to the published layout."""
        pieces = [Piece(layer.info, shard) for shard in layer.info.shards]
        stored = [stored_of(layer, piece, self._fp8(piece)) for piece in pieces]
        numbers = [s[self._fp8(piece).numbers.suffix] for piece, s in zip(pieces, stored, strict=True)]
        rows, columns = self._common(pieces)
        scales = [self._scales(p, s, rows, columns) for p, s in zip(pieces, stored, strict=True)]
        widest = max(scale.shape[-1] for scale in scales)
        layer.replace_parameters(
            {
                # torch joins no 8-bit floats.
                WEIGHT: torch.cat([n.view(torch.uint8) for n in numbers], 1).view(torch.float8_e4m3fn),
                SCALE: torch.cat([s.expand(-1, -1, widest) for s in scales], 1).contiguous(),
            }
        )

    def _fp8(self, piece: Piece) -> ScaledStorage:
        storage = self._storages[piece.shard.name]
        assert isinstance(storage, ScaledStorage), "asked for by are_fp8"
        return storage

    def _common(self, pieces: Sequence[Piece]) -> tuple[int, int]:
        """Return outputs and inputs of the largest blocks that no cut goes through; inputs are 0 for all."""
        rows, columns = 0, 0
        for piece in pieces:
            grid = self._fp8(piece).scale
            rows = math.gcd(rows, grid.rows, *piece.rows)
            columns = math.gcd(columns, grid.columns, *piece.columns) if grid.columns else columns
        return rows, columns

    def _scales(self, piece: Piece, stored: Mapping[str, torch.Tensor], rows: int, columns: int) -> torch.Tensor:
        """Return float32 [X, O / rows, I / columns]."""
        storage, found = self._fp8(piece), []
        inputs = piece.column_indices(stored[storage.numbers.suffix].device)[:: columns or piece.size[1]]
        for expert in range(piece.info.num_experts):
            one = storage.row_scales(piece, {name: tensor[expert] for name, tensor in stored.items()})
            spread = one if one.shape[-1] == 1 else one[:, inputs // storage.scale.columns]
            found.append(spread[::rows])
        return torch.stack(found)


def are_fp8(info: LayerInfo, storages: Mapping[str, Storage]) -> bool:
    """Return whether all matrices of a layer are float8_e4m3fn numbers with scales, and nothing else."""
    return all(_is_fp8(Piece(info, shard), storages[shard.name]) for shard in info.shards)


def _is_fp8(piece: Piece, storage: Storage) -> bool:
    if not isinstance(storage, ScaledStorage) or not isinstance(storage.numbers, Typed) or not storage.is_plain(piece):
        return False
    return piece.dtype(storage.numbers.suffix, storage.numbers.default) == NARROW
