"""How products with packed weights are launched. Legend: T rows of activations, I inputs, O outputs, J groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jackfield_quantization.triton_dense_plan import filled_splits
from jackfield_quantization.triton_packed import BLOCK
from jackfield_quantization.triton_packed_kernels import packed_kernel
from jackfield_triton.launch import power_of_two

FEW_ROWS, SOME_ROWS = 16, 64


@dataclass(frozen=True, slots=True)
class PackedShape:
    """Rows of weight and of activations of a program, blocks of columns in a tile, warps, and tiles in flight."""

    block_o: int
    block_t: int
    tiles: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [O, I] of four-bit numbers.

    Args:
        numbers: uint8 [O, I / 2], as ``triton_packed_kernels`` says. scales: [O, J]. zeros: uint8 [O, J]. group:
            columns of a group.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group: int


def packed_shape(rows: int, group: int = BLOCK) -> PackedShape:
    """Return the launch for so many rows. Not measured yet: chosen so that what a program holds fits its registers."""
    if rows <= FEW_ROWS:
        return PackedShape(32, 16, 2, 4, 4)
    if rows <= SOME_ROWS:
        return PackedShape(64, 64, 1, 4, 4)
    # Small groups need a scale for each column of a tile.
    return PackedShape(128, 64 if group % (BLOCK // 2) else 128, 1, 8, 3)


def packed_product(
    x_TI: torch.Tensor,
    weight: Packed,
    bias_O: torch.Tensor | None,
    out_TO: torch.Tensor,
    cores: int,
    counters: torch.Tensor,
    shape: PackedShape | None = None,
    splits: int = 0,
) -> torch.Tensor:
    """Write ``x @ W.T + bias`` into ``out`` and return it. Can be recorded into a graph.

    Args:
        x_TI: contiguous inside a row. bias_O: contiguous, or None. out_TO: contiguous inside a row. cores:
            multiprocessors. counters: int32 zeros, one for each program's rows; zero again afterwards. shape, splits:
            how to launch; chosen when not given.
    """
    (rows, inputs), outputs = x_TI.shape, weight.numbers.shape[0]
    shape = packed_shape(rows, weight.group) if shape is None else shape
    blocks, slices = -(-outputs // shape.block_o), -(-rows // shape.block_t)
    tiles = -(-inputs // (BLOCK * shape.tiles))
    if not splits:
        splits = filled_splits(blocks * slices, tiles, cores) if rows <= FEW_ROWS else 1
    splits = -(-tiles // -(-tiles // splits))  # those that have a tile
    parts = counters
    if splits > 1:
        assert counters.numel() >= blocks * slices
        size = blocks * slices * splits * shape.block_o * shape.block_t
        parts = torch.empty(size, dtype=torch.float32, device=x_TI.device)
    packed_kernel[(blocks, slices, splits)](
        x_TI,
        weight.numbers,
        weight.scales,
        weight.zeros,
        weight.scales if bias_O is None else bias_O,
        out_TO,
        parts,
        counters,
        rows,
        outputs,
        inputs,
        weight.scales.shape[1],
        x_TI.stride(0),
        out_TO.stride(0),
        BLOCK=BLOCK,
        GROUP=weight.group,
        BLOCK_O=shape.block_o,
        BLOCK_T=shape.block_t,
        TILES=shape.tiles,
        MERGE=power_of_two(splits),
        BIAS=bias_O is not None,
        STAGES=shape.stages,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out_TO


def counters_needed(outputs: int) -> int:
    """Return how many counters a weight needs: only few rows are split."""
    return -(-outputs // packed_shape(1).block_o)
