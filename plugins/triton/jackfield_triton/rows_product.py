"""How products of many rows are launched on capability 9.0 (``gluon_rows_kernels``).

Legend: M rows, X matrices, O outputs, I inputs; P pairs of a row and a matrix, B blocks of :data:`BLOCK` rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jackfield.interfaces import DeviceFacts, Reason
from jackfield_triton.launch import has_gluon, launch_options

if TYPE_CHECKING:
    import torch

BLOCK = 128
"""Rows that share a matrix, in two halves, the second of which costs nothing where it is empty."""
HALF = 64
COLUMNS = 256
DEPTH = 64
STAGES = 4
"""Pieces in flight: what the shared memory of a multiprocessor holds."""
SWIZZLE = 16
"""Blocks whose tiles follow one another, so that they find the weight in the cache."""
ALIGNMENT = 8
"""Rows of two-byte numbers that the copy engine moves are whole 16-byte words."""
WORD = 16
"""Bytes that it wants rows to begin at a multiple of."""
ACTIVATIONS = frozenset({"silu", "gelu_tanh"})
CAPABILITY = 9
"""The one with these kernels' matrix instructions."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Whose rows are whose.

    Args:
        order: [B, BLOCK], int32: the pairs of each block, P where there is none. owners: [B], int32: the matrices of
            blocks, -1 for empty ones, which are the last. pairs: P. chosen: pairs that share a row of what is
            multiplied, which is gathered; 0 where rows are in the order of the blocks already.
    """

    order: torch.Tensor
    owners: torch.Tensor
    pairs: int
    chosen: int = 0


def has_wide_groups(capability: tuple[int, int]) -> bool:
    """Return whether these kernels run."""
    return capability[0] == CAPABILITY and has_gluon()


def other_device(device: DeviceFacts | None) -> list[Reason]:
    """Return why these kernels do not run on a device: it has other matrix instructions."""
    if device is None or device.capability[0] == CAPABILITY:
        return []
    found = ".".join(map(str, device.capability))
    return [Reason("capability", "device.capability", f"{found} is not {CAPABILITY}.0")]


def tiles(rows: int, outputs: int, *, gated: bool) -> int:
    """Return how many tiles of results a product with one matrix has; ``outputs`` are those of the matrix."""
    return -(-rows // BLOCK) * _parts(outputs, gated)


def _parts(outputs: int, gated: bool) -> int:
    """Return the tiles along the outputs of a matrix, of which half are gates."""
    return -(-outputs // 2 // (COLUMNS // 2)) if gated else -(-outputs // COLUMNS)


def rows_product(
    x: torch.Tensor,
    weight_XOI: torch.Tensor,
    out: torch.Tensor,
    cores: int,
    *,
    grouping: Grouping | None = None,
    activation: str = "",
    factors_P: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Write the products of rows with their matrices into ``out`` and return it.

    Args:
        x: [M, I] of two-byte floats; copied where it is not contiguous inside a row, or rows are not whole 16-byte
            words. weight_XOI: contiguous; one matrix where there is no grouping. out: contiguous: [M, O], or
            [B * BLOCK, O] in the order of the blocks, where rows without a pair are left undefined. cores:
            multiprocessors. activation: of the first half of the outputs, which is multiplied with the second one, so
            that ``out`` has half as many columns; ``""`` for none. factors_P: float32, what results are multiplied
            with.
    """
    from jackfield_triton.gluon_rows_kernels import rows_kernel

    whole = x.stride(1) == 1 and x.stride(0) % ALIGNMENT == 0 and x.data_ptr() % WORD == 0
    x = x if whole else x.new_empty(x.shape).copy_(x)
    gathered, (matrices, outputs, inputs) = grouping is not None and grouping.chosen > 0, weight_XOI.shape
    order, owners = (out, out) if grouping is None else (grouping.order, grouping.owners)
    pairs = len(x) if grouping is None else grouping.pairs
    blocks = -(-len(x) // BLOCK) if grouping is None else len(grouping.owners)
    parts = _parts(outputs, bool(activation))
    weight = weight_XOI.view(2 * matrices, outputs // 2, inputs) if activation else weight_XOI
    box = [2, COLUMNS // 2, DEPTH] if activation else [1, COLUMNS, DEPTH]
    rows_kernel[(min(cores, blocks * parts),)](
        x if gathered else _described(x, [HALF, DEPTH]),
        _described(weight, box),
        _described(out, [HALF, COLUMNS // 2]),
        out if factors_P is None else factors_P,
        order,
        owners,
        pairs,
        blocks,
        parts,
        -(-inputs // DEPTH),
        x.stride(0),
        CHOSEN=grouping.chosen if grouping is not None and gathered else 1,
        GATHER=gathered,
        GATED=bool(activation),
        OWNED=grouping is not None,
        WEIGH=factors_P is not None,
        ACTIVATION=activation,
        STAGES=STAGES,
        SWIZZLE=SWIZZLE,
        num_warps=4,
        **launch_options(pdl),
    )
    return out


def _described(tensor: torch.Tensor, box: list[int]) -> Any:
    """Return what the kernel moves tiles through; bytes in shared memory are ordered as the matrix units like them."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, box, NVMMASharedLayout(128, 16, len(box)))
