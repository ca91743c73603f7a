"""Launchers of the grouped products. Legend: N rows, S chosen, P = N * S pairs, X experts, B blocks, E width, F inner,
O outputs, I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from jackfield.interfaces import ExpertsRequest, QuantizedActivation
from jackfield.interfaces.moe import ExpertMatrices
from jackfield.layers.functional import quantize_rows
from jackfield_moe.triton_kernels import count_kernel, experts_kernel, place_kernel, sum_kernel
from jackfield_moe.triton_plan import Launch

SCAN = 1024
"""Most pairs that a program looks at together when it sorts them."""
SUM_BLOCK = 1024
NARROW_ROWS = 32
"""From so many rows on, 8-bit weights are multiplied by 8-bit rows: below, what counts is how weights are read."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Pairs sorted into blocks of one expert each: ``order`` [B, ROWS] and ``owners`` [B], int32."""

    order: torch.Tensor
    owners: torch.Tensor
    pairs: int


def sort_pairs(experts_NS: torch.Tensor, experts: int, rows: int) -> Blocks:
    """Return blocks of ``rows`` pairs. The number of blocks follows from sizes alone, so that the host need not wait
    and a recorded graph stays right; some are empty.

    Args:
        experts_NS: contiguous; -1 for no expert. experts: X.
    """
    pairs, device = experts_NS.numel(), experts_NS.device
    # Every expert that has pairs adds at most one block that is not full.
    blocks = max(1, min(pairs, pairs // rows + min(experts, pairs)))
    order = torch.empty(blocks * rows, dtype=torch.int32, device=device)
    owners = torch.empty(blocks, dtype=torch.int32, device=device)
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    scan = min(SCAN, max(16, triton.next_power_of_2(pairs)))
    flat = experts_NS.reshape(-1)
    count_kernel[(experts,)](flat, counts, pairs, BLOCK=scan, num_warps=4)
    sizes = {"BLOCK": scan, "EXPERTS": triton.next_power_of_2(experts), "ROWS": rows}
    place_kernel[(experts + 1,)](flat, counts, order, owners, pairs, experts, blocks, **sizes, num_warps=4)
    return Blocks(order, owners, pairs)


def grouped_product(
    x: torch.Tensor | QuantizedActivation,
    matrices: ExpertMatrices,
    blocks: Blocks,
    out_PO: torch.Tensor,
    launch: Launch,
    *,
    chosen: int,
    activation: str = "",
    gated: bool = False,
    alpha: float = 0.0,
    limit: float = 0.0,
    factors_P: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write each pair's product, biased, activated and weighed, into ``out`` and return it. Pairs without an expert are
    not written.

    Args:
        x: [P / chosen, I], contiguous inside a row. blocks: of ``launch.rows`` pairs. out_PO: contiguous inside a row.
            chosen: pairs that share a row of ``x``. activation: see ``experts_kernel``; the matrix has 2 * O rows where
            it is gated. factors_P: float32, or None.
    """
    narrow = isinstance(x, QuantizedActivation)
    values = x.values if isinstance(x, QuantizedActivation) else x
    outputs, inputs = out_PO.shape[1], values.shape[1]
    group, scale_rows, row_scale = _scaling(matrices, inputs)
    count = len(blocks.owners)
    experts_kernel[(count * -(-outputs // launch.columns),)](
        values,
        x.scales if isinstance(x, QuantizedActivation) else values,
        *_pointers(matrices, factors_P),
        out_PO,
        blocks.order,
        blocks.owners,
        blocks.pairs,
        count,
        outputs,
        inputs,
        values.stride(0),
        *_strides(matrices),
        out_PO.stride(0),
        alpha,
        limit,
        CHOSEN=chosen,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
        DEPTH=launch.depth,
        SWIZZLE=launch.swizzle,
        LAYOUT=matrices.layout,
        GROUP=group,
        SCALE_ROWS=scale_rows,
        ROW_SCALE=row_scale,
        ZERO=matrices.zero is not None,
        NARROW=narrow,
        BIAS=matrices.bias is not None,
        ACTIVATION=activation,
        GATED=gated,
        WEIGH=factors_P is not None,
        PRECISION="ieee" if values.dtype == torch.float32 else "tf32",
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return out_PO


def _pointers(matrices: ExpertMatrices, factors_P: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return weight, scale, zero, bias and factors; the weight stands for what there is none of, and is not read."""
    weight = matrices.weight
    others = (matrices.scale, matrices.zero, matrices.bias, factors_P)
    return weight, *(weight if other is None else other for other in others)


def _strides(matrices: ExpertMatrices) -> tuple[int, ...]:
    """Return the strides of experts and rows in the weight and the scale, and of experts in the bias."""
    scale, bias = matrices.scale, matrices.bias
    scales = (0, 0) if scale is None else (scale.stride(0), scale.stride(1))
    return matrices.weight.stride(0), matrices.weight.stride(1), *scales, 0 if bias is None else bias.stride(0)


def sum_chosen(parts_PE: torch.Tensor, experts_NS: torch.Tensor, *, partial: bool) -> torch.Tensor:
    """Return [N, E]: the sum over each row's chosen experts, in float32 until it is rounded once."""
    rows, chosen = experts_NS.shape
    out = parts_PE.new_empty((rows, parts_PE.shape[1]))
    block = min(SUM_BLOCK, triton.next_power_of_2(out.shape[1]))
    grid = (rows, -(-out.shape[1] // block))
    sizes = {"CHOSEN": chosen, "BLOCK": block, "PARTIAL": partial}
    sum_kernel[grid](parts_PE, experts_NS, out, out.shape[1], **sizes, num_warps=4)
    return out


def run_experts(
    request: ExpertsRequest,
    launches: tuple[Launch, Launch],
    x_NE: torch.Tensor | QuantizedActivation,
    up: ExpertMatrices,
    down: ExpertMatrices,
    weights_NS: torch.Tensor,
    experts_NS: torch.Tensor,
    dtype: torch.dtype,
    activation: str,
) -> torch.Tensor:
    """Return [N, E]; see ExpertsBackend.apply. ``activation`` is in the kernel's words."""
    experts_NS = experts_NS.contiguous()
    chosen, pairs = experts_NS.shape[1], experts_NS.numel()
    blocks = sort_pairs(experts_NS, len(up.weight), launches[0].rows)
    device, inner = experts_NS.device, up.weight.shape[1] // (2 if request.gated else 1)
    inner_PF = torch.empty((pairs, inner), dtype=dtype, device=device)
    grouped_product(
        x_NE,
        up,
        blocks,
        inner_PF,
        launches[0],
        chosen=chosen,
        activation=activation,
        gated=request.gated,
        alpha=request.alpha,
        limit=request.limit,
    )
    if launches[1].rows != launches[0].rows:
        blocks = sort_pairs(experts_NS, len(up.weight), launches[1].rows)
    rows = quantize_rows(inner_PF) if isinstance(x_NE, QuantizedActivation) else inner_PF
    out_PE = torch.empty((pairs, down.weight.shape[1]), dtype=dtype, device=device)
    grouped_product(rows, down, blocks, out_PE, launches[1], chosen=1, factors_P=weights_NS.reshape(-1))
    return sum_chosen(out_PE, experts_NS, partial="partial" in request.needs)


def given_rows(x_NE: torch.Tensor, up: ExpertMatrices, down: ExpertMatrices) -> torch.Tensor | QuantizedActivation:
    """Return rows as they are multiplied; ``x`` is contiguous inside a row."""
    narrow = all(m.layout == "fp8" and m.scale is not None and m.scale.shape[2] == 1 for m in (up, down))
    return quantize_rows(x_NE) if narrow and len(x_NE) >= NARROW_ROWS else x_NE


def _scaling(matrices: ExpertMatrices, inputs: int) -> tuple[int, int, bool]:
    """Return (inputs that share a scale inside a row, outputs that do, whether whole rows share one)."""
    scale = matrices.scale
    if scale is None:
        return 0, 1, False
    scale_rows, group = -(-matrices.weight.shape[1] // scale.shape[1]), -(-inputs // scale.shape[2])
    if scale.shape[2] == 1 and scale_rows == 1 and matrices.zero is None and matrices.layout != "mxfp4":
        return 0, 1, True
    return _whole(group, scale.shape[2], inputs), _whole(scale_rows, scale.shape[1], matrices.weight.shape[1]), False


def _whole(size: int, count: int, total: int) -> int:
    """Return the size of a block: the last one may be cut short, which only powers of two are known to be."""
    if size * count == total:
        return size
    return int(triton.next_power_of_2(size))
