"""How products with packed weights are launched. Legend: T rows of activations, I inputs, O outputs, J groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from triton.runtime import JITFunction

from jackfield_quantization.triton_packed import PLANES
from jackfield_quantization.triton_packed_kernels import packed_few_kernel, packed_kernel
from jackfield_triton.launch import launch_options, power_of_two, triton_version

FEW_ROWS = 32
"""Up to so many rows, sums over groups are scaled; beyond, weights are."""
ROWS_OF_WEIGHT = 64
"""What programs have of a weight, at least."""
MOST_SPLITS = 8
SLICED_ROWS = 0
"""Up to so many rows, the kernel in slices where Triton has Gluon: none, until a device has run it."""
SLICED_BLOCK = 128
SLICED_OUTPUTS = 16
"""Rows of weight of a program in slices."""
LEAST_COLUMNS = 8 if triton_version() >= (3, 3) else 16
"""Of a product on matrix units: Triton 3.2 knows no narrower ones than 16."""


@dataclass(frozen=True, slots=True)
class PackedShape:
    """How to launch.

    Args:
        block_o: rows of weight of a program. block_t: rows of activations. warps: of a program. stages: tiles in
            flight. splits: programs that share rows of weight, each with a part of I. few: the kernel of few rows,
            which has no more than ``block_t``. tma: the copy engine brings tiles. slices: blocks of columns of a step
            of the kernel in slices; 0: another kernel.
    """

    block_o: int
    block_t: int
    warps: int
    stages: int
    splits: int = 1
    few: bool = False
    tma: bool = False
    slices: int = 0


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [O, I] of four-bit numbers.

    Args:
        numbers: int16 [I / block, O, block / 4], as ``triton_packed_kernels`` says. codes: int32 [J, O], scales and
            zero points. group: columns of a group.
    """

    numbers: torch.Tensor
    codes: torch.Tensor
    group: int

    @property
    def block(self) -> int:
        """Columns whose numbers share words."""
        return PLANES * self.numbers.shape[2]


def has_copy_engine(capability: tuple[int, int]) -> bool:
    """Return whether the copy engine can bring tiles, with room for those of :func:`packed_shape`: capability 12 has a
    third of the memory that 9 and 10 have.
    """
    return (9, 0) <= capability < (12, 0) and find_spec("triton.tools.tensor_descriptor") is not None


def packed_shape(rows: int, outputs: int, cores: int, tma: bool, sliced: bool = False) -> PackedShape:
    """Return the launch: the fastest, or at most 9 % slower, of those tried on an H200 for the matrices of an 8B model
    (``benchmarks/gpu_packed.py``).

    Args:
        rows: T. outputs: O. cores: multiprocessors. tma: see :func:`has_copy_engine`. sliced: the kernel in slices can
            be launched.
    """
    if sliced and rows <= SLICED_ROWS:
        return sliced_shape(rows, outputs, cores)
    if rows <= 8:
        return _shared(PackedShape(64, LEAST_COLUMNS, 2, 4, few=True), rows, outputs, 4.5 * cores)
    if rows <= FEW_ROWS:
        return _shared(PackedShape(64, 16 if rows <= 16 else 32, 4, 4, few=True), rows, outputs, 2.5 * cores)
    if not tma:
        return _shared(PackedShape(64, 64, 4, 3), rows, outputs, 2 * cores)
    if rows <= 64:
        tall = outputs >= 2 * ROWS_OF_WEIGHT * cores
        shape = PackedShape(128, 64, 4, 3, tma=True) if tall else PackedShape(64, 64, 4, 5, tma=True)
        return _shared(shape, rows, outputs, 2 * cores)
    if rows <= 128:
        return _shared(PackedShape(64, 128, 4, 3, tma=True), rows, outputs, 2 * cores)
    return _shared(PackedShape(64, 256, 4, 3, tma=True), rows, outputs, cores)


def sliced_shape(rows: int, outputs: int, cores: int) -> PackedShape:
    """Return the launch of the kernel in slices: where programs are few, more is on its way for each."""
    few = outputs <= 2 * SLICED_OUTPUTS * cores
    return PackedShape(SLICED_OUTPUTS, 8 if rows <= 8 else 16, 8, 1, few=True, slices=16 if few else 8)


def _shared(shape: PackedShape, rows: int, outputs: int, programs: float) -> PackedShape:
    """Return ``shape`` with the power of two of splits that comes closest to so many programs."""
    if rows > shape.block_t:
        return shape
    splits = 1 << max(0, round(math.log2(programs / -(-outputs // shape.block_o))))
    return PackedShape(
        shape.block_o, shape.block_t, shape.warps, shape.stages, min(splits, MOST_SPLITS), shape.few, shape.tma
    )


def counters_needed(outputs: int) -> int:
    """Return how many counters a weight needs: products are shared where one program has all rows."""
    return -(-outputs // ROWS_OF_WEIGHT)


def splits_used(tiles: int, splits: int) -> int:
    """Return how many of the splits have a tile."""
    return -(-tiles // -(-tiles // min(splits, tiles)))


def packed_product(
    x_TI: torch.Tensor,
    weight: Packed,
    bias_O: torch.Tensor | None,
    out_TO: torch.Tensor,
    shape: PackedShape,
    counters: torch.Tensor,
    pdl: bool = False,
) -> torch.Tensor:
    """Write ``x @ W.T + bias`` into ``out`` and return it. Can be recorded into a graph.

    Args:
        x_TI: contiguous inside a row, with rows of whole 16 bytes where the copy engine brings them. bias_O:
            contiguous, or None. out_TO: contiguous inside a row. shape: how to launch. counters: int32 zeros, one for
            each program where there are splits; zero again afterwards. pdl: see ``jackfield_triton.launch``; few rows
            are not launched so, since that was slower, unless they are in slices.
    """
    if shape.slices:
        return _sliced_product(x_TI, weight, bias_O, out_TO, shape, pdl)
    (rows, inputs), outputs, block = x_TI.shape, weight.numbers.shape[1], weight.block
    blocks, slices = -(-outputs // shape.block_o), -(-rows // shape.block_t)
    splits = splits_used(inputs // block, shape.splits)
    assert slices == 1 or not shape.few
    parts = counters
    if splits > 1:
        assert counters.numel() >= blocks * slices
        size = blocks * slices * splits * shape.block_o * shape.block_t
        parts = torch.empty(size, dtype=torch.float32, device=x_TI.device)
    tensors = (weight.codes, weight.codes if bias_O is None else bias_O, out_TO, parts, counters)
    sizes = (rows, outputs, inputs, x_TI.stride(0), out_TO.stride(0))
    options: dict[str, Any] = {
        "BLOCK": block,
        "GROUP": weight.group,
        "PER": planes_together(weight.group, block),
        "BLOCK_O": shape.block_o,
        "BLOCK_T": shape.block_t,
        "BIAS": bias_O is not None,
        "STAGES": shape.stages,
        "UNITS": isinstance(packed_kernel, JITFunction) and x_TI.dtype != torch.float32,
        "num_warps": shape.warps,
        "num_stages": shape.stages,
    }
    if shape.few:
        packed_few_kernel[(blocks, splits)](
            x_TI, weight.numbers, *tensors, *sizes, MERGE=power_of_two(splits), **options
        )
        return out_TO
    x: Any = _described(x_TI, shape.block_t, block) if shape.tma else x_TI
    words: Any = weight.numbers
    if shape.tma:
        words = _described(weight.numbers.flatten(0, 1), shape.block_o, block // PLANES)
    options |= {"MERGE": 1 if splits == 1 else 0, "TMA": shape.tma, **launch_options(pdl)}
    packed_kernel[(blocks, slices, splits)](x, words, *tensors, *sizes, **options)
    return out_TO


def _sliced_product(
    x_TI: torch.Tensor,
    weight: Packed,
    bias_O: torch.Tensor | None,
    out_TO: torch.Tensor,
    shape: PackedShape,
    pdl: bool,
) -> torch.Tensor:
    """See :func:`packed_product`."""
    # Late: Gluon cannot be run by the interpreter.
    from jackfield_quantization.gluon_packed_kernels import sliced_kernel

    (rows, inputs), outputs = x_TI.shape, weight.numbers.shape[1]
    assert weight.block == SLICED_BLOCK and rows <= shape.block_t
    assert x_TI.dtype in (torch.bfloat16, torch.float16)
    tensors = (x_TI, weight.numbers, weight.codes, weight.codes if bias_O is None else bias_O, out_TO)
    sliced_kernel[(-(-outputs // SLICED_OUTPUTS),)](
        *tensors,
        rows,
        outputs,
        inputs,
        x_TI.stride(0),
        out_TO.stride(0),
        ROWS=shape.block_t,
        GROUP=weight.group,
        PER=planes_together(weight.group, SLICED_BLOCK),
        SLICES=shape.slices,
        WARPS=shape.warps,
        BIAS=bias_O is not None,
        num_warps=shape.warps,
        **launch_options(pdl),
    )
    return out_TO


def planes_together(group: int, block: int) -> int:
    """Return how many neighbouring planes of a block lie in one group, where that is the same for all of them."""
    return next(planes for planes in (4, 2, 1) if group % (block // PLANES * planes) == 0)


def _described(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    """Return what the copy engine brings tiles through."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [rows, columns])
