"""Experts as gpt-oss stores them. Legend: X experts, O outputs, I inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from jackfield.interfaces import LayerInfo, LinearScheme, ParameterHolder, ParameterSpec
from jackfield_quantization.mxfp4 import BLOCKS, SCALES
from jackfield_quantization.packing import microscaled
from jackfield_quantization.stored import Piece
from jackfield_quantization.unquantized_scheme import WEIGHT

SCALE = "weight_scale"
BLOCK, BYTES = 32, 16
"""Numbers that share an exponent, and the bytes they take."""


class Mxfp4Experts(LinearScheme):
    """``blocks`` uint8 [X, O, I / 32, 16] and ``scales`` uint8 [X, O, I / 32] become the layout ``mxfp4``."""

    layout: ClassVar[str] = "mxfp4"

    def parameters(self, info: LayerInfo) -> Sequence[ParameterSpec]:
        """Return both tensors for each shard."""
        found = []
        for shard in info.shards:
            piece = Piece(info, shard)
            found.append(piece.matrix(BLOCKS, "uint8", block=(BLOCK, 1), rest=(BYTES,)))
            found.append(piece.matrix(SCALES, "uint8", block=(BLOCK, 1)))
        return found

    def finalize(self, layer: ParameterHolder) -> None:
        """Stack the shards; the bytes stay as they are."""
        weights, scales = [], []
        for shard in layer.info.shards:
            blocks, exponents_ = (layer.get_parameter(s.name).detach() for s in self._specs(layer, shard.name))
            weights.append(blocks.flatten(2))
            scales.append(exponents_)
        layer.replace_parameters({WEIGHT: torch.cat(weights, 1), SCALE: torch.cat(scales, 1)})

    def dequantize(self, layer: ParameterHolder) -> torch.Tensor:
        """Return the experts [X, O, I] in float32."""
        return microscaled(layer.get_parameter(WEIGHT), layer.get_parameter(SCALE))

    def _specs(self, layer: ParameterHolder, shard: str) -> list[ParameterSpec]:
        return [spec for spec in self.parameters(layer.info) if spec.shard == shard]
