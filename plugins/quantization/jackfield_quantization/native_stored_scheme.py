"""Whole numbers as blocks that kernels in C read. Legend: O outputs, I inputs, J blocks of inputs, B bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from jackfield.interfaces import LayerInfo, ParameterHolder, ParameterSpec
from jackfield_native.products import Part
from jackfield_quantization.native_schemes import WORDS, NativeScheme
from jackfield_quantization.stored import DecodedScheme, Integers, Piece, Storage, decoded, stored_of
from jackfield_quantization.unquantized_scheme import WEIGHT

BLOCK = 32
"""Inputs of a block of the kernels' types."""
FOUR_BITS, EIGHT_BITS = (-8, 7), (-128, 127)


class NativeStoredScheme(NativeScheme):
    """Loads what is stored; becomes one packed weight for each matrix where that is exact, else one dense weight."""

    def __init__(self, storages: Mapping[str, Storage]) -> None:
        super().__init__()
        self._storages = storages
        self._words: tuple[str, ...] = ()

    def parameters(self, info: LayerInfo) -> Sequence[ParameterSpec]:
        """Return the parameters of all shards."""
        return DecodedScheme(self._storages).parameters(info)

    def finalize(self, layer: ParameterHolder) -> None:
        """Pack the matrices again."""
        made: list[Part] = []
        for shard in layer.info.shards:
            piece, storage = Piece(layer.info, shard), self._storages[shard.name]
            matrix = storage.integers(piece, stored_of(layer, piece, storage))
            part = None if matrix is None else as_blocks(matrix)
            if part is None:
                dense = decoded(layer, self._storages)
                made = [(dense, WORDS[dense.dtype])]
                break
            made.append(part)
        self._words = tuple(word for _, word in made)
        layer.replace_parameters({f"{WEIGHT}_{i}": stored for i, (stored, _) in enumerate(made)})

    def parts(self, layer: ParameterHolder) -> Sequence[Part]:
        """See NativeScheme."""
        return [(layer.get_parameter(f"{WEIGHT}_{i}"), word) for i, word in enumerate(self._words)]


def as_blocks(matrix: Integers) -> Part | None:
    """Return the matrix in the smallest type that holds it exactly, or None where there is none."""
    scales = scales_of_blocks(matrix)
    if scales is None or not torch.equal(scales.half().float(), scales):
        return None
    values = torch.unflatten(matrix.values, 1, (-1, BLOCK))
    least, most = int(values.min()), int(values.max())
    head = scales.half().unsqueeze(-1).view(torch.uint8)
    if FOUR_BITS[0] <= least and most <= FOUR_BITS[1]:
        nibbles = (values - FOUR_BITS[0]).to(torch.uint8)
        body, word = nibbles[..., : BLOCK // 2] | nibbles[..., BLOCK // 2 :] << 4, "Q4_0"
    elif EIGHT_BITS[0] <= least and most <= EIGHT_BITS[1]:
        body, word = values.to(torch.int8).view(torch.uint8), "Q8_0"
    else:
        return None
    return torch.cat((head, body), -1).flatten(1), word


def scales_of_blocks(matrix: Integers) -> torch.Tensor | None:
    """Return float32 scales [O, J], or None where a block has several."""
    if matrix.values.shape[1] % BLOCK:
        return None
    groups = matrix.groups.view(-1, BLOCK)
    if not bool((groups == groups[:, :1]).all()):
        return None
    return matrix.scales[:, groups[:, 0]]
