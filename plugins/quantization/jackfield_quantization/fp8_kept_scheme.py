"""Stored 8-bit floats with a scale for each output, multiplied as they are. Legend: O outputs, I inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from jackfield.interfaces import LayerInfo, ParameterHolder, ParameterSpec
from jackfield_quantization.fp8_scheme import Fp8Scheme
from jackfield_quantization.fp8_storage import are_fp8
from jackfield_quantization.scaled import ScaledStorage
from jackfield_quantization.stored import DecodedScheme, Piece, Storage, stored_of


class KeptFp8Scheme(Fp8Scheme):
    """Loads what is stored; a scale for a whole matrix becomes that of each of its outputs."""

    def __init__(self, storages: Mapping[str, Storage]) -> None:
        super().__init__()
        self._storages = storages

    def parameters(self, info: LayerInfo) -> Sequence[ParameterSpec]:
        """Return the parameters of all shards."""
        return DecodedScheme(self._storages).parameters(info)

    def finalize(self, layer: ParameterHolder) -> None:
        """Stack the shards and their scales."""
        weights, scales = [], []
        for shard in layer.info.shards:
            piece, storage = Piece(layer.info, shard), self._storages[shard.name]
            assert isinstance(storage, ScaledStorage), "asked for by can_be_kept"
            stored = stored_of(layer, piece, storage)
            # torch joins no 8-bit floats.
            weights.append(stored[storage.numbers.suffix].view(torch.uint8))
            scales.append(storage.row_scales(piece, stored)[:, 0])
        self.hold(layer, torch.cat(weights).view(torch.float8_e4m3fn), torch.cat(scales).contiguous())


def can_be_kept(info: LayerInfo, storages: Mapping[str, Storage]) -> bool:
    """Return whether all matrices of a layer are 8-bit floats with no more than a scale for each output."""
    one_for_all = all(isinstance(s, ScaledStorage) and not s.scale.columns for s in storages.values())
    return one_for_all and are_fp8(info, storages)
