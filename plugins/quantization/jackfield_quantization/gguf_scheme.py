"""GGUF weights of a layer: packed while they are loaded, one dense weight afterwards.

The shards of a fused layer may have different types, so that each has a parameter of its own until then. A row of a
packed matrix is a sequence of blocks of ``block`` values in ``nbytes`` bytes. Legend as in unquantized_scheme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import gguf
import numpy as np
import torch
from gguf.quants import dequantize as dequantize_array

from jackfield.errors import CheckpointError
from jackfield.interfaces import LayerInfo, OutputShard, ParameterHolder, ParameterSpec
from jackfield_quantization.gguf import PACKED_TYPES, PLAIN_TYPES, PREFIX
from jackfield_quantization.unquantized_scheme import WEIGHT, DenseScheme, matrix_dims, weight_shape

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

CHUNK_VALUES = 1 << 20
"""Values that are dequantized at once; the decoders hold several float32 copies of them."""
JOINED_BYTES = 1 << 12
"""Packed bytes of the rows that are decoded as one."""


class GgufScheme(DenseScheme):
    """Parameters ``weight_SHARD`` (``weight`` for a layer of one nameless matrix), stacked into ``weight`` by
    finalize.
    """

    def parameters(self, info: LayerInfo) -> Sequence[ParameterSpec]:
        """Return one parameter for each shard, stored as in the file.

        Raises:
            CheckpointError: the file lacks a shard, or holds it in a type that cannot be read.
        """
        sizes = zip(info.shards, info.local_output_sizes, strict=True)
        return tuple(_shard_spec(info, shard, rows) for shard, rows in sizes)

    def finalize(self, layer: ParameterHolder) -> None:
        """Replace the packed parameters by one dense weight in the computation type."""
        info = layer.info
        output_dim, _ = matrix_dims(info)
        shape = weight_shape(info, sum(info.local_output_sizes), info.local_input_size)
        device = layer.get_parameter(parameter_name(info.shards[0])).device
        dense = torch.empty(shape, dtype=getattr(torch, info.dtype), device=device)
        start = 0
        for shard, rows in zip(info.shards, info.local_output_sizes, strict=True):
            part = dense.narrow(output_dim, start, rows)
            dequantize_into(layer.get_parameter(parameter_name(shard)).detach(), storage_type(info, shard), part)
            start += rows
        layer.replace_parameters({WEIGHT: dense})


def parameter_name(shard: OutputShard) -> str:
    """Return the attribute that holds a shard until finalize."""
    return f"{WEIGHT}_{shard.name}" if shard.name else WEIGHT


def storage_type(info: LayerInfo, shard: OutputShard) -> str:
    """Return GGML's word for the type of a shard.

    Raises:
        CheckpointError: the file lacks it, or the type cannot be read.
    """
    facts = info.tensors.get(shard.name, {}).get(WEIGHT)
    label = f"{info.name} ({shard.name})" if shard.name else info.name
    if facts is None:
        raise CheckpointError(
            f"the checkpoint has no weight for layer {label}",
            field=info.name,
            value=info.sources.get(shard.name),
            remedy="use a complete file, or another architecture plugin",
        )
    word = facts.dtype.removeprefix(PREFIX)
    # Older releases of the gguf package lack the newest types.
    known = PLAIN_TYPES.keys() | PACKED_TYPES & gguf.GGMLQuantizationType.__members__.keys()
    if not facts.dtype.startswith(PREFIX) or word not in known:
        raise CheckpointError(
            f"layer {label} is stored as {facts.dtype}, which cannot be dequantized",
            field=info.name,
            value=facts.dtype,
            remedy="use a newer gguf package or a file in another quantization",
        )
    return word


def _shard_spec(info: LayerInfo, shard: OutputShard, rows: int) -> ParameterSpec:
    word = storage_type(info, shard)
    columns = info.local_input_size
    dtype, stored, block = PLAIN_TYPES.get(word, "uint8"), columns, None
    if word in PACKED_TYPES:
        block = block_of(word)
        _check_columns(info, columns, word, block[0])
        stored = columns // block[0] * block[1]
    output_dim, input_dim = matrix_dims(info)
    return ParameterSpec(
        parameter_name(shard),
        WEIGHT,
        weight_shape(info, rows, stored),
        dtype,
        output_dim=output_dim,
        input_dim=input_dim,
        input_block=block,
        shard=shard.name,
    )


def _check_columns(info: LayerInfo, columns: int, word: str, block: int) -> None:
    if columns % block:
        raise CheckpointError(
            f"layer {info.name} has {columns} input columns on this rank, no multiple of the {block} of a {word} block",
            field=info.name,
            value=columns,
            remedy="use fewer ranks, or a file in another quantization",
        )


def block_of(word: str) -> tuple[int, int]:
    """Return values and bytes of one block of a packed type."""
    values, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[word]]
    return values, nbytes


def dequantize_into(stored: torch.Tensor, word: str, out: torch.Tensor) -> None:
    """Write the values of ``stored`` into ``out``.

    Args:
        stored: [..., O, stored columns], uint8 for packed types.
        word: GGML's word for its type.
        out: [..., O, I] of any floating type; may be a view.
    """
    if word in PLAIN_TYPES:
        out.copy_(stored)
        return
    kind = gguf.GGMLQuantizationType[word]
    for experts_stored, experts_out in _matrices(stored, out):
        step = _chunk_rows(experts_out.shape[-1])
        for start in range(0, experts_out.shape[0], step):
            packed = experts_stored[start : start + step].cpu().contiguous().numpy()
            experts_out[start : start + step].copy_(torch.from_numpy(_dequantize_rows(packed, kind)))


def _chunk_rows(columns: int) -> int:
    """Return rows of one chunk: a multiple of 64 where possible, so that they can be joined evenly."""
    rows = max(1, CHUNK_VALUES // columns)
    return rows // 64 * 64 or rows


def _matrices(stored: torch.Tensor, out: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(stored, out)] if stored.dim() == 2 else list(zip(stored, out, strict=True))


def _dequantize_rows(packed: Array, kind: gguf.GGMLQuantizationType) -> Array:
    rows = packed.shape[0]
    # The decoders work on 16 rows at a time: joining short rows makes them twice as fast.
    most = max(1, JOINED_BYTES // packed.shape[1])
    join = math.gcd(rows, 1 << (most.bit_length() - 1))
    # Scales of damaged files may be infinite; what numpy says about them helps nobody.
    with np.errstate(all="ignore"):
        values: Array = dequantize_array(packed.reshape(rows // join, -1), kind)
    return values.reshape(rows, -1)
