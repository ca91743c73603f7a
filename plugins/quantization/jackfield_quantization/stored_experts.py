"""Experts of quantized checkpoints, in the published layout that holds them as they are.

Legend: X experts, O outputs, I inputs, J groups of inputs, G inputs of a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch

from jackfield.interfaces import LayerInfo, LinearScheme, ParameterHolder
from jackfield_quantization.fp8_storage import Fp8StoredExperts, are_fp8
from jackfield_quantization.packing import microscaled
from jackfield_quantization.scaled import Nibbles, ScaledStorage
from jackfield_quantization.stored import DecodedScheme, Piece, Storage, Stored, stored_of
from jackfield_quantization.stored_method import unreadable
from jackfield_quantization.unquantized_scheme import WEIGHT

SCALE, ZERO = "weight_scale", "weight_zero"
LARGEST = 15
MX_BLOCK = 32


def experts_scheme(info: LayerInfo, storages: Mapping[str, Storage]) -> LinearScheme:
    """Return the scheme of a layer of experts: packed where all its matrices fit one layout, else dense."""
    if _are_four_bits(info, storages):
        return PackedExperts(storages)
    if are_fp8(info, storages):
        return Fp8StoredExperts(storages)
    if all(_is_microscaled(Piece(info, shard), storages[shard.name]) for shard in info.shards):
        return MicroscaledExperts(storages)
    return DecodedScheme(storages)


def _are_four_bits(info: LayerInfo, storages: Mapping[str, Storage]) -> bool:
    return all(storages[shard.name].four_bit_group(Piece(info, shard)) is not None for shard in info.shards)


def _is_microscaled(piece: Piece, storage: Storage) -> bool:
    """Return whether a matrix is in ``mxfp4``, and this rank's part of it whole blocks."""
    if not isinstance(storage, ScaledStorage) or not isinstance(storage.numbers, Nibbles) or storage.factor:
        return False
    whole = not any(edge % MX_BLOCK for edge in piece.columns)
    in_order = storage.is_plain(piece) and storage.scale.in_order
    return whole and in_order and storage.scale.columns == MX_BLOCK


class PackedExperts(DecodedScheme):
    """Becomes the layout ``int4``; groups are made smaller where a cut goes through them."""

    layout: ClassVar[str] = "int4"
    becomes_dense: ClassVar[bool] = False

    def finalize(self, layer: ParameterHolder) -> None:
        """Pack expert by expert, and stack the shards."""
        pieces = [Piece(layer.info, shard) for shard in layer.info.shards]
        group = math.gcd(*(self._group(piece) for piece in pieces))
        stacked: dict[str, list[torch.Tensor]] = {WEIGHT: [], SCALE: [], ZERO: []}
        for piece in pieces:
            stored = stored_of(layer, piece, self._storages[piece.shard.name])
            experts = range(layer.info.num_experts)
            made = [self._packed(piece, {name: t[x] for name, t in stored.items()}, group) for x in experts]
            for name, several in stacked.items():
                several.append(torch.stack([one[name] for one in made]))
        layer.replace_parameters({name: torch.cat(several, 1) for name, several in stacked.items()})

    def _group(self, piece: Piece) -> int:
        """Return inputs of the largest groups of this rank that no cut goes through."""
        group = self._storages[piece.shard.name].four_bit_group(piece)
        assert group is not None, "asked for by experts_scheme"
        return math.gcd(group, *piece.columns)

    def _packed(self, piece: Piece, stored: Stored, group: int) -> dict[str, torch.Tensor]:
        """Return one expert's matrix: weight uint8 [O, I / 2], scale [O, J], zero uint8 [O, J]."""
        matrix = self._storages[piece.shard.name].integers(piece, stored)
        assert matrix is not None, "four bits are whole numbers"
        groups_JG = torch.unflatten(matrix.groups, 0, (-1, group))
        if not bool((groups_JG == groups_JG[:, :1]).all()):
            detail = "its groups are of inputs in another order, which config.json denies"
            raise unreadable(piece.info, piece.label, detail)
        values = torch.unflatten(matrix.values, 1, (-1, group))
        # Any zero point will do that makes all numbers of a group positive: they span no more than four bits.
        zero_OJ = (-values.amin(-1)).clamp(0, LARGEST)
        flat = (values + zero_OJ.unsqueeze(-1)).to(torch.uint8).flatten(1)
        packed = flat[:, 0::2] | flat[:, 1::2] << 4
        return {WEIGHT: packed, SCALE: matrix.scales[:, groups_JG[:, 0]], ZERO: zero_OJ.to(torch.uint8)}

    def dequantize(self, layer: ParameterHolder) -> torch.Tensor:
        """Return the experts [X, O, I] in float32."""
        packed, scale, zero = (layer.get_parameter(name) for name in (WEIGHT, SCALE, ZERO))
        numbers = torch.stack((packed & LARGEST, packed >> 4), -1).flatten(2).float()
        groups = torch.unflatten(numbers, 2, (scale.shape[2], -1))
        found: torch.Tensor = ((groups - zero.float().unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(2)
        return found


class MicroscaledExperts(DecodedScheme):
    """Becomes the layout ``mxfp4``; the bytes stay as they are."""

    layout: ClassVar[str] = "mxfp4"
    becomes_dense: ClassVar[bool] = False

    def finalize(self, layer: ParameterHolder) -> None:
        """Stack the shards, and take this rank's exponents."""
        weights, scales = [], []
        for shard in layer.info.shards:
            piece, storage = Piece(layer.info, shard), self._storages[shard.name]
            assert isinstance(storage, ScaledStorage), "asked for by experts_scheme"
            stored = stored_of(layer, piece, storage)
            start, stop = (edge // MX_BLOCK for edge in piece.columns)
            weights.append(stored[storage.numbers.suffix])
            scales.append(stored[storage.scale.suffix(piece)].view(torch.uint8)[..., start:stop])
        layer.replace_parameters({WEIGHT: torch.cat(weights, 1), SCALE: torch.cat(scales, 1)})

    def dequantize(self, layer: ParameterHolder) -> torch.Tensor:
        """Return the experts [X, O, I] in float32."""
        return microscaled(layer.get_parameter(WEIGHT), layer.get_parameter(SCALE))
