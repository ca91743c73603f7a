"""Matrices whose inputs or outputs are rotated: the rotations become part of them.

Legend: O outputs, I inputs, N size of a rotation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from jackfield.interfaces import ParameterSpec
from jackfield_quantization.compressed_rotations import INPUT, RANDOM_MATRIX, Rotation
from jackfield_quantization.stored import Piece, Storage, Stored
from jackfield_quantization.stored_method import unreadable


class RotatedStorage(Storage):
    """``y = ((x V) W.T) U`` is ``x (U.T W V.T).T``.

    Args:
        stored: how ``W`` is stored. rotations: ``V``, ``U`` or both.
    """

    def __init__(self, stored: Storage, rotations: Sequence[Rotation]) -> None:
        self._stored, self._rotations = stored, tuple(rotations)

    def parameters(self, piece: Piece) -> Sequence[ParameterSpec]:
        """See Storage. A rank's part must be whole blocks of a rotation."""
        found = list(self._stored.parameters(piece))
        for rotation, size in self._sized(piece):
            inputs = rotation.place == INPUT
            piece.check_cut("inputs" if inputs else "outputs", piece.columns if inputs else piece.rows, size)
            if not rotation.is_stored:
                continue
            suffix = rotation.suffix(size)
            if piece.facts and suffix not in piece.facts:
                detail = f"the checkpoint has no matrix '{rotation.name}_{rotation.place}.weight' of size {size}"
                raise unreadable(piece.info, piece.label, detail, "save the model again, with its rotations")
            found.append(piece.whole(suffix, piece.dtype(suffix, "float32"), (size, size)))
        return found

    def decode(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """See Storage. Sums are in float64: matrices that are not orthogonal have large inverses."""
        wide_OI = self._stored.decode(piece, stored).double()
        for rotation, size in self._sized(piece):
            matrix_NN = self._matrix(rotation, size, stored).to(wide_OI)
            if rotation.place == INPUT:
                wide_OI = (torch.unflatten(wide_OI, 1, (-1, size)) @ matrix_NN.t()).flatten(1)
            else:
                wide_OI = (matrix_NN.t() @ torch.unflatten(wide_OI, 0, (-1, size))).flatten(0, 1)
        return wide_OI.float()

    def _sized(self, piece: Piece) -> Iterator[tuple[Rotation, int]]:
        """Yield the rotations with their sizes.

        Raises:
            CheckpointError: the matrix is not made of blocks of such a size, or nothing makes one of it.
        """
        for rotation in self._rotations:
            whole = piece.info.input_size if rotation.place == INPUT else piece.shard.size
            size = rotation.size or whole
            if whole % size or (not rotation.is_stored and size & (size - 1)):
                detail = f"{whole} {rotation.place}s are not rotated by a {rotation.kind} matrix of size {size}"
                raise unreadable(piece.info, piece.label, detail, "correct quantization_config in config.json")
            yield rotation, size

    def _matrix(self, rotation: Rotation, size: int, stored: Stored) -> torch.Tensor:
        """Return the matrix that activations are multiplied by, float32 [N, N]."""
        made_NN = stored[rotation.suffix(size)].float() if rotation.is_stored else hadamard(size)
        if rotation.kind == RANDOM_MATRIX:
            return made_NN
        made_NN = made_NN / math.sqrt(size)
        return made_NN.t() if rotation.inverse else made_NN


def hadamard(size: int) -> torch.Tensor:
    """Return Sylvester's matrix of 1 and -1, float32 [N, N], for a power of two."""
    found: torch.Tensor = torch.ones(1, 1)
    while len(found) < size:
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
    return found
