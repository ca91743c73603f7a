"""The launcher of the products of few rows. Legend: T rows of activations, I inputs, O outputs."""

from __future__ import annotations

import torch

from jackfield_quantization.triton_dense_kernels import skinny_kernel
from jackfield_quantization.triton_dense_plan import FEW_ROWS, MOST_ROWS, MOST_SPLITS, SkinnyShape

MERGES = (1, 4, MOST_SPLITS)
"""Bounds of splits that kernels are compiled for."""


def skinny_product(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    out_TO: torch.Tensor,
    shape: SkinnyShape,
    counters: torch.Tensor,
) -> torch.Tensor:
    """Write ``x @ W.T + bias`` into ``out`` and return it. Can be recorded into a graph.

    Args:
        x_TI: 1 to 16 rows (1 to 4 without matrix units), contiguous inside a row. weight_OI: contiguous inside a row.
        bias_O: contiguous, or None. out_TO: contiguous inside a row. shape: how to launch. counters: int32 zeros, one
            for each ``block_o`` outputs where there is more than one split; zero again afterwards.
    """
    (rows, inputs), outputs = x_TI.shape, weight_OI.shape[0]
    blocks, padded = -(-outputs // shape.block_o), padded_rows(rows, shape)
    assert x_TI.stride(1) == weight_OI.stride(1) == out_TO.stride(1) == 1
    assert shape.splits == 1 or counters.numel() >= blocks
    parts = counters
    if shape.splits > 1:
        size = blocks * shape.splits * padded * shape.block_o
        parts = torch.empty(size, dtype=torch.float32, device=x_TI.device)
    skinny_kernel[(blocks, shape.splits)](
        x_TI,
        weight_OI,
        weight_OI if bias_O is None else bias_O,
        out_TO,
        parts,
        counters,
        rows,
        outputs,
        inputs,
        x_TI.stride(0),
        weight_OI.stride(0),
        out_TO.stride(0),
        ROWS=padded,
        BLOCK_O=shape.block_o,
        BLOCK_I=shape.block_i,
        MERGE=next(bound for bound in MERGES if bound >= shape.splits),
        STAGES=shape.stages,
        EVEN=inputs % shape.block_i == 0,
        MATRIX=shape.matrix,
        BIAS=bias_O is not None,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out_TO


def padded_rows(rows: int, shape: SkinnyShape) -> int:
    """Return the rows that a program computes: 16 on matrix units, else the least power of two."""
    assert 0 < rows <= (MOST_ROWS if shape.matrix else FEW_ROWS)
    return MOST_ROWS if shape.matrix else 1 << (rows - 1).bit_length()
