"""Launchers of the grouped products. Legend: N rows, S chosen, P = N * S pairs, X experts, B blocks, E width, F inner,
O outputs, I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from jackfield.interfaces import ExpertsRequest, QuantizedActivation
from jackfield.interfaces.moe import ExpertMatrices
from jackfield.layers.functional import quantize_rows
from jackfield_moe.triton_few_kernels import few_down_kernel, few_up_kernel
from jackfield_moe.triton_kernels import count_kernel, experts_kernel, place_kernel, sum_kernel
from jackfield_moe.triton_plan import FewLaunch, Launch
from jackfield_triton.launch import launch_options, power_of_two
from jackfield_triton.rows_product import BLOCK, Grouping, rows_product

SCANS = (256, 1024, 4096)
"""Numbers of pairs that a program looks at together when it sorts them: few, since each is a kernel of its own."""
MOST_CHUNKS = 16
"""Bound of chunks that most steps stay below."""
SUM_BLOCK = 1024
COPY_BYTES = 16
"""What addresses and rows of the copy engine must be multiples of."""
NARROW_ROWS = 32
"""From so many rows on, 8-bit weights are multiplied by 8-bit rows: below, what counts is how weights are read."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Pairs sorted into blocks of one expert each: ``order`` [B, ROWS], ``owners`` [B] and, where they were asked for,
    ``places`` [P], all int32; places of pairs without an expert are not defined.
    """

    order: torch.Tensor
    owners: torch.Tensor
    pairs: int
    places: torch.Tensor | None = None


def sort_pairs(experts_NS: torch.Tensor, experts: int, rows: int, *, places: bool = False, pdl: bool = False) -> Blocks:
    """Return blocks of ``rows`` pairs. The number of blocks follows from sizes alone, so that the host need not wait
    and a recorded graph stays right; some are empty.

    Args:
        experts_NS: contiguous; -1 for no expert. experts: X. places: whether to say where pairs are.
    """
    pairs, device = experts_NS.numel(), experts_NS.device
    # Every expert that has pairs adds at most one block that is not full.
    blocks = max(1, min(pairs, pairs // rows + min(experts, pairs)))
    order = torch.empty(blocks * rows, dtype=torch.int32, device=device)
    owners = torch.empty(blocks, dtype=torch.int32, device=device)
    scan = next((size for size in SCANS if size >= pairs), SCANS[-1])
    chunks = -(-pairs // scan)
    flat, counts = experts_NS.reshape(-1), owners
    options = {"BLOCK": scan, "EXPERTS": power_of_two(experts + 1), "num_warps": 4, **launch_options(pdl)}
    if chunks > 1:
        counts = torch.empty((chunks, experts), dtype=torch.int32, device=device)
        count_kernel[(chunks,)](flat, counts, pairs, experts, **options)
    found = torch.empty(pairs, dtype=torch.int32, device=device) if places else None
    where = order if found is None else found
    sizes = {"ROWS": rows, "CHUNKS": 1 if chunks == 1 else max(MOST_CHUNKS, power_of_two(chunks)), "PLACES": places}
    place_kernel[(experts + 1, chunks)](flat, counts, order, owners, where, pairs, experts, blocks, **sizes, **options)
    return Blocks(order, owners, pairs, found)


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
    pdl: bool = False,
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
    count = len(blocks.owners)
    weight, *others = _pointers(matrices, factors_P)
    strides = _strides(matrices)
    described = launch.tma and _describable(matrices, inputs, launch.depth)
    if described:
        weight, strides = _descriptor(matrices.weight, launch), (matrices.weight.shape[1], *strides[1:])
    experts_kernel[(count * -(-outputs // launch.columns),)](
        values,
        x.scales if isinstance(x, QuantizedActivation) else values,
        weight,
        *others,
        out_PO,
        blocks.order,
        blocks.owners,
        blocks.pairs,
        count,
        outputs,
        inputs,
        values.stride(0),
        *strides,
        out_PO.stride(0),
        alpha,
        limit,
        CHOSEN=chosen,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
        DEPTH=launch.depth,
        SWIZZLE=launch.swizzle,
        NARROW=narrow,
        ACTIVATION=activation,
        GATED=gated,
        WEIGH=factors_P is not None,
        PRECISION="ieee" if values.dtype == torch.float32 else "tf32",
        EVEN=inputs % launch.depth == 0,
        TMA=described,
        **_layout(matrices, inputs),
        num_warps=launch.warps,
        num_stages=launch.stages,
        **launch_options(pdl),
    )
    return out_PO


def _describable(matrices: ExpertMatrices, inputs: int, depth: int) -> bool:
    """Return whether the copy engine can bring tiles of the weight: whole ones, of numbers that need no scale yet."""
    weight = matrices.weight
    plain = matrices.layout == "dense" or (matrices.layout == "fp8" and _scaling(matrices, inputs)[2])
    aligned = inputs * weight.element_size() % COPY_BYTES == 0 and weight.data_ptr() % COPY_BYTES == 0
    return plain and aligned and inputs % depth == 0 and weight.is_contiguous()


def _descriptor(weight_XOI: torch.Tensor, launch: Launch) -> Any:
    """Return what the kernel loads tiles of all experts' rows through."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(weight_XOI.flatten(0, 1), [launch.columns, launch.depth])


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


def sum_chosen(
    parts_PE: torch.Tensor,
    experts_NS: torch.Tensor,
    *,
    places_P: torch.Tensor | None = None,
    partial: bool,
    pdl: bool = False,
) -> torch.Tensor:
    """Return [N, E]: the sum over each row's chosen experts, in float32 until it is rounded once. ``parts`` are in the
    order of pairs, or where ``places`` say.
    """
    rows, chosen = experts_NS.shape
    out = parts_PE.new_empty((rows, parts_PE.shape[1]))
    block = min(SUM_BLOCK, power_of_two(out.shape[1]))
    grid = (rows, -(-out.shape[1] // block))
    sizes = {"CHOSEN": chosen, "BLOCK": block, "PARTIAL": partial, "PLACES": places_P is not None}
    where = experts_NS if places_P is None else places_P
    sum_kernel[grid](parts_PE, experts_NS, where, out, out.shape[1], **sizes, num_warps=4, **launch_options(pdl))
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
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Return [N, E]; see ExpertsBackend.apply. ``activation`` is in the kernel's words."""
    experts_NS = experts_NS.contiguous()
    chosen, pairs = experts_NS.shape[1], experts_NS.numel()
    blocks = sort_pairs(experts_NS, len(up.weight), launches[0].rows, pdl=pdl)
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
        pdl=pdl,
    )
    if launches[1].rows != launches[0].rows:
        blocks = sort_pairs(experts_NS, len(up.weight), launches[1].rows, pdl=pdl)
    rows = quantize_rows(inner_PF) if isinstance(x_NE, QuantizedActivation) else inner_PF
    out_PE = torch.empty((pairs, down.weight.shape[1]), dtype=dtype, device=device)
    grouped_product(rows, down, blocks, out_PE, launches[1], chosen=1, factors_P=weights_NS.reshape(-1), pdl=pdl)
    return sum_chosen(out_PE, experts_NS, partial="partial" in request.needs, pdl=pdl)


def many_experts(
    request: ExpertsRequest,
    cores: int,
    x_NE: torch.Tensor,
    up: ExpertMatrices,
    down: ExpertMatrices,
    weights_NS: torch.Tensor,
    experts_NS: torch.Tensor,
    activation: str,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Return [N, E] like :func:`run_experts`, for many rows of dense matrices that are gated, without biases. Between
    the two products rows stay in the order of blocks. ``cores``: multiprocessors.
    """
    experts_NS = experts_NS.contiguous()
    blocks = sort_pairs(experts_NS, len(up.weight), BLOCK, places=True, pdl=pdl)
    grouping = Grouping(blocks.order.view(-1, BLOCK), blocks.owners, blocks.pairs, experts_NS.shape[1])
    rows = len(blocks.order)
    inner = x_NE.new_empty((rows, up.weight.shape[1] // 2))
    rows_product(x_NE, up.weight, inner, cores, grouping=grouping, activation=activation, pdl=pdl)
    out = x_NE.new_empty((rows, down.weight.shape[1]))
    factors_P = weights_NS.reshape(-1)
    rows_product(inner, down.weight, out, cores, grouping=replace(grouping, chosen=0), factors_P=factors_P, pdl=pdl)
    partial = "partial" in request.needs
    return sum_chosen(out, experts_NS, places_P=blocks.places, partial=partial, pdl=pdl)


def few_experts(
    request: ExpertsRequest,
    launch: FewLaunch,
    x_NE: torch.Tensor,
    up: ExpertMatrices,
    down: ExpertMatrices,
    weights_NS: torch.Tensor,
    experts_NS: torch.Tensor,
    activation: str,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Return [N, E] like :func:`run_experts`, for few rows."""
    experts_NS, weights_NS = experts_NS.contiguous(), weights_NS.contiguous()
    (rows, chosen), inner = experts_NS.shape, up.weight.shape[1] // (2 if request.gated else 1)
    inner_PF = x_NE.new_empty((rows * chosen, inner))
    common: dict[str, Any] = {
        "CHOSEN": chosen,
        "STAGES": launch.stages,
        "num_warps": launch.warps,
        **launch_options(pdl),
    }
    few_up_kernel[(-(-inner // launch.up_columns), rows * chosen)](
        x_NE,
        *_pointers(up, None)[:4],
        inner_PF,
        experts_NS,
        inner,
        x_NE.shape[1],
        x_NE.stride(0),
        *_strides(up),
        inner_PF.stride(0),
        request.alpha,
        request.limit,
        COLUMNS=launch.up_columns,
        DEPTH=launch.up_depth,
        ACTIVATION=activation,
        GATED=request.gated,
        **_layout(up, x_NE.shape[1]),
        **common,
    )
    out_NE = x_NE.new_empty((rows, down.weight.shape[1]))
    few_down_kernel[(-(-out_NE.shape[1] // launch.down_columns), rows)](
        inner_PF,
        *_pointers(down, weights_NS),
        out_NE,
        experts_NS,
        out_NE.shape[1],
        inner,
        inner_PF.stride(0),
        *_strides(down),
        out_NE.stride(0),
        SLOTS=power_of_two(chosen),
        COLUMNS=launch.down_columns,
        DEPTH=launch.down_depth,
        **_layout(down, inner),
        **common,
    )
    return out_NE


def _layout(matrices: ExpertMatrices, inputs: int) -> dict[str, Any]:
    """Return what kernels are told of a layout."""
    group, scale_rows, row_scale = _scaling(matrices, inputs)
    return {
        "LAYOUT": matrices.layout,
        "GROUP": group,
        "SCALE_ROWS": scale_rows,
        "ROW_SCALE": row_scale,
        "ZERO": matrices.zero is not None,
        "BIAS": matrices.bias is not None,
    }


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
    return power_of_two(size)
