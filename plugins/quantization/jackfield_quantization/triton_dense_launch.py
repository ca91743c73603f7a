"""The launcher of the products of few rows. Legend: T rows of activations, I inputs, O outputs."""

from __future__ import annotations

import torch

from jackfield.interfaces import PendingNorm
from jackfield_quantization.triton_dense_kernels import skinny_kernel
from jackfield_quantization.triton_dense_plan import FEW_ROWS, MOST_ROWS, MOST_SPLITS, SkinnyShape
from jackfield_triton.launch import launch_options, triton_version

LEAST_ROWS = 8 if triton_version() >= (3, 4) else MOST_ROWS
"""What fewer rows are padded to on matrix units: their instructions take 8, versions of Triton before 3.4 no less than
16.
"""
MERGES = (1, 4, MOST_SPLITS)
"""Bounds of splits that kernels are compiled for."""
MOST_AHEAD = 2
"""Most tiles of weight that a program holds in registers before it waits."""


def skinny_product(
    given: torch.Tensor | PendingNorm,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    out_TO: torch.Tensor,
    shape: SkinnyShape,
    counters: torch.Tensor,
    pdl: bool = False,
    scale_O: torch.Tensor | None = None,
    gate: str = "",
) -> torch.Tensor:
    """Write ``x @ (scale * W).T + bias`` into ``out`` and return it. Can be recorded into a graph.

    Args:
        given: x [T, I], 1 to 16 rows (1 to 4 without matrix units), contiguous inside a row; or the same before their
            norm (one split, and one row without matrix units). weight_OI: contiguous inside a row. bias_O: contiguous,
            or None. out_TO: contiguous inside a row. shape: how to launch. counters: int32 zeros, one for each
            ``block_o`` outputs where there is more than one split; zero again afterwards. pdl: see
            ``jackfield_triton.launch``; the weights must then be older than the kernel before. scale_O: float32, of
            the rows of a weight in a narrower type than ``x``, or None. gate: activation (one of ``GATES``' values) of
            the first half of the outputs, by which the second half is multiplied; ``out`` is then [T, O / 2].
    """
    norm = given if isinstance(given, PendingNorm) else None
    x_TI = given.x if isinstance(given, PendingNorm) else given
    (rows, inputs), outputs = x_TI.shape, weight_OI.shape[0]
    blocks, padded = -(-outputs // shape.block_o), padded_rows(rows, shape)
    splits = splits_used(inputs, shape)
    assert x_TI.stride(1) == weight_OI.stride(1) == out_TO.stride(1) == 1
    assert splits == 1 or (counters.numel() >= blocks and norm is None)
    assert out_TO.shape == (rows, outputs // 2 if gate else outputs)
    parts = counters
    if splits > 1:
        size = blocks * splits * padded * shape.block_o
        parts = torch.empty(size, dtype=torch.float32, device=x_TI.device)
    added = norm is not None and norm.residual is not None
    skinny_kernel[(blocks, splits)](
        x_TI,
        norm.residual if norm is not None and added else x_TI,
        x_TI if norm is None else norm.weight,
        norm.total if norm is not None and added else out_TO,
        weight_OI,
        weight_OI if scale_O is None else scale_O,
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
        0.0 if norm is None else norm.eps,
        ROWS=padded,
        MERGE=next(bound for bound in MERGES if bound >= splits),
        EVEN=inputs % shape.block_i == 0,
        SCALE=scale_O is not None,
        BIAS=bias_O is not None,
        NORM=norm is not None,
        ADDED=added,
        GATE=gate,
        AHEAD=tiles_ahead(inputs, shape) if pdl else 0,
        **options_of(shape),
        **launch_options(pdl),
    )
    return out_TO


def options_of(shape: SkinnyShape) -> dict[str, int]:
    """Return the keyword arguments of a launch that ``shape`` alone decides."""
    found = {"BLOCK_O": shape.block_o, "BLOCK_I": shape.block_i, "MATRIX": shape.matrix, "SLICES": shape.slices}
    found |= {"STAGES": shape.stages, "num_stages": shape.stages, "num_warps": shape.warps}
    return found | {"maxnreg": shape.registers} if shape.registers else found


def padded_rows(rows: int, shape: SkinnyShape) -> int:
    """Return the rows that a program computes: 8 or 16 on matrix units, else the least power of two."""
    assert 0 < rows <= (MOST_ROWS if shape.matrix else FEW_ROWS)
    if shape.matrix:
        return LEAST_ROWS if rows <= LEAST_ROWS else MOST_ROWS
    return 1 << (rows - 1).bit_length()


def splits_used(inputs: int, shape: SkinnyShape) -> int:
    """Return how many of the splits have a tile."""
    tiles = -(-inputs // shape.block_i)
    return -(-tiles // -(-tiles // shape.splits))


def tiles_ahead(inputs: int, shape: SkinnyShape) -> int:
    """Return how many tiles of weight a program reads before it waits: no more than the last split, the shortest, has.

    Where tiles are in flight anyway, the first alone starts the stream of weights.
    """
    tiles, splits = -(-inputs // shape.block_i), splits_used(inputs, shape)
    shortest = tiles - (splits - 1) * -(-tiles // splits)
    return min(shortest, MOST_AHEAD if shape.stages == 1 else 1)
