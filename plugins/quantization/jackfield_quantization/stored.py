"""Layers of quantized checkpoints: what is stored for each matrix, and plain numbers out of it.

A :class:`Storage` knows one format. It sees a :class:`Piece`: one matrix of a layer, or this rank's part of it. Big
tensors are cut by the loader; scales come with all their input columns, so that a cut may go through a group. Legend: O
outputs, I inputs, X experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from jackfield.errors import CheckpointError
from jackfield.interfaces import (
    LayerInfo,
    OutputShard,
    Parallel,
    ParameterHolder,
    ParameterSpec,
    TensorFacts,
    even_slice,
)
from jackfield_quantization.unquantized_scheme import WEIGHT, DenseScheme, matrix_dims, weight_shape

Stored = Mapping[str, torch.Tensor]
"""Tensors of one matrix, by suffix."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint matrix of a layer, as far as this rank holds it."""

    info: LayerInfo
    shard: OutputShard

    @property
    def label(self) -> str:
        """What errors call it."""
        return f"{self.info.name} ({self.shard.name})" if self.shard.name else self.info.name

    @property
    def rows(self) -> tuple[int, int]:
        """``[start, stop)`` outputs of the whole matrix."""
        if self.info.parallel is Parallel.COLUMN:
            return self.shard.slice(self.info.rank)
        return 0, self.shard.size

    @property
    def columns(self) -> tuple[int, int]:
        """``[start, stop)`` inputs of the whole matrix."""
        if self.info.parallel is Parallel.ROW:
            return even_slice(self.info.input_size, self.info.rank, self.info.input_unit)
        return 0, self.info.input_size

    @property
    def size(self) -> tuple[int, int]:
        """O and I of this rank."""
        (first, last), (start, stop) = self.rows, self.columns
        return last - first, stop - start

    @property
    def facts(self) -> Mapping[str, TensorFacts]:
        """What the checkpoint has of it, by suffix; empty where nothing is known."""
        return self.info.tensors.get(self.shard.name, {})

    def column_indices(self, device: torch.device) -> torch.Tensor:
        """Return the inputs of this rank as indices into the whole matrix."""
        return torch.arange(*self.columns, device=device)

    def dtype(self, suffix: str, default: str) -> str:
        """Return the type that the checkpoint has a tensor in."""
        return self.facts[suffix].dtype if suffix in self.facts else default

    def shape(self, suffix: str) -> tuple[int, ...] | None:
        """Return the shape of one expert's tensor in the checkpoint, or None where it has none."""
        if suffix not in self.facts:
            return None
        shape = self.facts[suffix].shape
        main = max(len(fact.shape) for fact in self.facts.values())
        together = self.info.num_experts and main > 2 and shape[:1] == (self.info.num_experts,)
        return shape[1:] if together else shape

    def matrix(
        self,
        suffix: str,
        dtype: str,
        *,
        block: tuple[int, int] = (1, 1),
        pack: int = 1,
        transposed: bool = False,
        rest: tuple[int, ...] = (),
    ) -> ParameterSpec:
        """Return a parameter that runs along outputs and inputs and is cut along both.

        Args:
            suffix: of its name. dtype: that it is stored in. block: (inputs, stored elements) of an indivisible block.
                pack: outputs in a stored element. transposed: it is stored as [I, O]. rest: further dimensions.

        Raises:
            CheckpointError: this rank's part begins or ends inside a block.
        """
        self.check_cut("inputs", self.columns, block[0])
        self.check_cut("outputs", self.rows, pack)
        outputs, inputs = self.size
        lengths = (outputs // pack, inputs // block[0] * block[1])
        dims = (1, 0) if transposed else (0, 1)
        shape = (*(reversed(lengths) if transposed else lengths), *rest)
        spec = self._spec(suffix, dtype, shape, dims[0], dims[1])
        return replace(spec, input_block=block, output_pack=pack)

    def beside(
        self,
        suffix: str,
        dtype: str,
        others: tuple[int, ...] = (),
        *,
        repeat: int = 1,
        pack: int = 1,
        transposed: bool = False,
        rest: tuple[int, ...] = (),
    ) -> ParameterSpec:
        """Return a parameter that runs along outputs, whose ``others`` dimensions are whole on each rank.

        Args:
            suffix, dtype, pack: as in :meth:`matrix`. others: further dimensions. repeat: outputs that an element
                stands for. transposed: outputs run behind ``others`` and not before them. rest: dimensions behind both.
        """
        self.check_cut("outputs", self.rows, pack)
        rows = self.size[0] // pack
        shape = (*others, rows, *rest) if transposed else (rows, *others, *rest)
        spec = self._spec(suffix, dtype, shape, len(others) if transposed else 0, None)
        return replace(spec, output_pack=pack, output_repeat=repeat)

    def whole(self, suffix: str, dtype: str, shape: tuple[int, ...], *, opaque: bool = False) -> ParameterSpec:
        """Return a parameter that is the same on each rank; ``opaque`` as in ParameterSpec."""
        return replace(self._spec(suffix, dtype, shape, None, None), opaque=opaque)

    def needed(self, suffix: str, dtype: str, *, opaque: bool = False) -> ParameterSpec:
        """Return a parameter that is whole on each rank, of the type and shape that the checkpoint has it in."""
        return self.whole(suffix, self.dtype(suffix, dtype), self.shape(suffix) or (), opaque=opaque)

    def known(self, *suffixes: str) -> list[ParameterSpec]:
        """Return parameters for those of these tensors that the checkpoint has; whole on each rank."""
        there = [suffix for suffix in suffixes if suffix in self.facts]
        return [self.needed(suffix, "float32") for suffix in there]

    def has_whole(self, unit: int) -> bool:
        """Return whether the matrix, and this rank's part of it, are whole groups of ``unit`` outputs."""
        return not any(edge % unit for edge in (*self.rows, self.shard.size))

    def own_rows(self, values: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return this rank's outputs out of theirs or out of all, which may be padded; they run along ``dim``."""
        first = self.rows[0] if values.shape[dim] >= self.shard.size else 0
        return values.narrow(dim, first, self.size[0])

    def check_cut(self, what: str, part: tuple[int, int], unit: int) -> None:
        """Refuse a part that begins or ends inside of a unit.

        Raises:
            CheckpointError: it does.
        """
        if any(edge % unit for edge in part):
            raise CheckpointError(
                f"{self.label}: {what} {part[0]} to {part[1]} are not whole groups of {unit}, as they are packed",
                field=self.info.name,
                value=part,
                remedy="use fewer ranks, or a checkpoint that is packed otherwise",
            )

    def _spec(
        self, suffix: str, dtype: str, shape: tuple[int, ...], output_dim: int | None, input_dim: int | None
    ) -> ParameterSpec:
        experts, front = self.info.num_experts, 1 if self.info.num_experts else 0
        name = suffix.replace(".", "_")
        return ParameterSpec(
            f"{name}__{self.shard.name}" if self.shard.name else f"{name}__",
            suffix,
            (experts, *shape) if experts else shape,
            dtype,
            output_dim=None if output_dim is None else output_dim + front,
            input_dim=None if input_dim is None else input_dim + front,
            shard=self.shard.name,
        )


@dataclass(frozen=True, slots=True)
class Integers:
    """A matrix of whole numbers.

    Args:
        values: [O, I], less their zero points. scales: float32 [O, J]. groups: int64 [I], the scale of each input.
    """

    values: torch.Tensor
    scales: torch.Tensor
    groups: torch.Tensor


def wide(matrix: Integers) -> torch.Tensor:
    """Return float32 numbers [O, I]."""
    return matrix.values.float() * matrix.scales[:, matrix.groups]


class Storage:
    """How one matrix is stored."""

    def parameters(self, piece: Piece) -> Sequence[ParameterSpec]:
        """Return the parameters to load for the matrix.

        Raises:
            CheckpointError: the checkpoint has it in another form, or a cut does not fit.
        """
        raise NotImplementedError

    def decode(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """Return the numbers [O, I] of this rank in float32, out of one expert's tensors."""
        raise NotImplementedError

    def four_bit_group(self, piece: Piece) -> int | None:
        """Return how many neighbouring inputs share a scale where numbers are whole and of four bits, else None."""
        return None

    def integers(self, piece: Piece, stored: Stored) -> Integers | None:
        """Return the same matrix as whole numbers with scales, or None where it is none."""
        return None


class PlainStorage(Storage):
    """A matrix that was left alone beside quantized ones."""

    def parameters(self, piece: Piece) -> Sequence[ParameterSpec]:
        """Return the one weight."""
        return (piece.matrix(WEIGHT, piece.dtype(WEIGHT, piece.info.dtype)),)

    def decode(self, piece: Piece, stored: Stored) -> torch.Tensor:
        """Return the weight."""
        return stored[WEIGHT].float()


class DecodedScheme(DenseScheme):
    """Loads what is stored and becomes one dense ``weight`` in the computation type when all is there.

    Args:
        storages: of each shard by name; matrices of one layer may be stored in different ways.
    """

    becomes_dense: ClassVar[bool] = True

    def __init__(self, storages: Mapping[str, Storage]) -> None:
        self._storages = storages

    def parameters(self, info: LayerInfo) -> Sequence[ParameterSpec]:
        """Return the parameters of all shards."""
        return [spec for shard in info.shards for spec in self._storages[shard.name].parameters(Piece(info, shard))]

    def finalize(self, layer: ParameterHolder) -> None:
        """Replace what was loaded by the dense weight, matrix by matrix and expert by expert."""
        layer.replace_parameters({WEIGHT: decoded(layer, self._storages)})


def decoded(layer: ParameterHolder, storages: Mapping[str, Storage]) -> torch.Tensor:
    """Return the dense weight [O, I] or [X, O, I] of a loaded layer, in the computation type."""
    info, (output_dim, _) = layer.info, matrix_dims(layer.info)
    dtype: torch.dtype = getattr(torch, info.dtype)
    dense: torch.Tensor | None = None
    start = 0
    for shard, rows in zip(info.shards, info.local_output_sizes, strict=True):
        piece, storage = Piece(info, shard), storages[shard.name]
        stored = stored_of(layer, piece, storage)
        if dense is None:
            shape = weight_shape(info, sum(info.local_output_sizes), info.local_input_size)
            dense = torch.empty(shape, dtype=dtype, device=next(iter(stored.values())).device)
        part = dense.narrow(output_dim, start, rows)
        if info.num_experts:
            for expert in range(info.num_experts):
                part[expert].copy_(storage.decode(piece, {name: all_[expert] for name, all_ in stored.items()}))
        else:
            part.copy_(storage.decode(piece, stored))
        start += rows
    assert dense is not None, "a layer has at least one shard"
    return dense


def stored_of(layer: ParameterHolder, piece: Piece, storage: Storage) -> dict[str, torch.Tensor]:
    """Return the loaded tensors of one matrix by suffix."""
    return {spec.suffix: layer.get_parameter(spec.name).detach() for spec in storage.parameters(piece)}
