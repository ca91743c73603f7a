"""Launchers of the Triton layer ops, with the signatures of the torch references, and ``pdl`` (see
``jackfield_triton.launch``).

Legend: T tokens, E width, F intermediate, H heads, D head size, R rotary size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from jackfield.interfaces import QuantizedActivation
from jackfield_ops.triton_kernels import (
    fused_add_rms_norm_kernel,
    gated_kernel,
    gated_quant_kernel,
    rms_norm_kernel,
    rotary_kernel,
)
from jackfield_triton.launch import launch_options, power_of_two

TILE = 4096
"""Elements that a program of narrow rows handles."""
GATED_BLOCK = 1024
ROTARY_HEADS = 8


def row_tile(rows: int, width: int) -> tuple[int, int, int]:
    """Return (padded width, rows of a program, warps). Few rows are spread over many programs."""
    block = power_of_two(width)
    tall = max(1, min(TILE // block, power_of_two(rows) // 256))
    return block, tall, min(16, max(1, block * tall // 512))


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, pdl: bool = False) -> torch.Tensor:
    """Root-mean-square norm over the last dimension of any tensor; a view with strided rows is read as it is."""
    out = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    _rms_norm(x_TE, weight_E, eps, out, None, pdl)
    return out


def rms_norm_quant(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, pdl: bool = False) -> QuantizedActivation:
    """The same, quantized row by row."""
    made = _narrow(x_TE.shape, x_TE.device)
    _rms_norm(x_TE, weight_E, eps, made.values, made.scales, pdl)
    return made


def _rms_norm(
    x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, out: torch.Tensor, scales: torch.Tensor | None, pdl: bool
) -> None:
    width = x_TE.shape[-1]
    rows = out.numel() // width if width else 0
    if not rows:
        return
    x, inner, stride_outer, stride_inner = _rows(x_TE)
    block, tall, warps = row_tile(rows, width)
    rms_norm_kernel[(-(-rows // tall),)](
        x,
        weight_E,
        out,
        out if scales is None else scales,
        rows,
        inner,
        stride_outer,
        stride_inner,
        eps,
        WIDTH=width,
        BLOCK=block,
        ROWS=tall,
        QUANT=scales is not None,
        num_warps=warps,
        **launch_options(pdl),
    )


def fused_add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(x + residual), x + residual), both new."""
    out = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    return out, _fused_add_rms_norm(x_TE, residual_TE, weight_E, eps, out, None, pdl)


def fused_add_rms_norm_quant(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, pdl: bool = False
) -> tuple[QuantizedActivation, torch.Tensor]:
    """The same, the norm quantized row by row."""
    made = _narrow(x_TE.shape, x_TE.device)
    return made, _fused_add_rms_norm(x_TE, residual_TE, weight_E, eps, made.values, made.scales, pdl)


def _fused_add_rms_norm(
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    pdl: bool,
) -> torch.Tensor:
    """Write the norm and return the sum."""
    width = x_TE.shape[-1]
    total = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    rows = out.numel() // width if width else 0
    if not rows:
        return total
    x, residual = _flat(x_TE), _flat(residual_TE)
    block, tall, warps = row_tile(rows, width)
    fused_add_rms_norm_kernel[(-(-rows // tall),)](
        x,
        residual,
        weight_E,
        out,
        out if scales is None else scales,
        total,
        rows,
        x.stride(0),
        residual.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        ROWS=tall,
        QUANT=scales is not None,
        num_warps=warps,
        **launch_options(pdl),
    )
    return total


def gated(kind: str, x_T2F: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """Return activation(gate) * up of ``[gate, up]``; ``kind`` is ``silu``, ``gelu`` or ``gelu_tanh``."""
    width = x_T2F.shape[-1] // 2
    out = torch.empty((*x_T2F.shape[:-1], width), dtype=x_T2F.dtype, device=x_T2F.device)
    x = _flat(x_T2F)
    if out.numel():
        grid = (len(x), -(-width // GATED_BLOCK))
        options = launch_options(pdl)
        gated_kernel[grid](x, out, width, x.stride(0), KIND=kind, BLOCK=GATED_BLOCK, num_warps=4, **options)
    return out


def gated_quant(kind: str, x_T2F: torch.Tensor, pdl: bool = False) -> QuantizedActivation:
    """The same, quantized row by row; a program has a whole row."""
    width = x_T2F.shape[-1] // 2
    made = _narrow((*x_T2F.shape[:-1], width), x_T2F.device)
    x, block = _flat(x_T2F), power_of_two(width)
    if made.values.numel():
        warps = min(8, max(1, block // 512))
        gated_quant_kernel[(len(x),)](
            x,
            made.values,
            made.scales,
            width,
            x.stride(0),
            KIND=kind,
            BLOCK=block,
            num_warps=warps,
            **launch_options(pdl),
        )
    return made


def rotary(x_THD: torch.Tensor, cos_sin_TR: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """Rotate the first R features of every head in place, pairs being (i, i + R/2). Heads may be strided."""
    tokens, heads = x_THD.shape[:2]
    half = cos_sin_TR.shape[-1] // 2
    assert x_THD.stride(-1) == 1
    assert cos_sin_TR.stride(-1) == 1
    if tokens and heads:
        rotary_kernel[(tokens, -(-heads // ROTARY_HEADS))](
            x_THD,
            cos_sin_TR,
            heads,
            x_THD.stride(0),
            x_THD.stride(1),
            cos_sin_TR.stride(0),
            HALF=half,
            BLOCK=power_of_two(half),
            HEADS=ROTARY_HEADS,
            num_warps=2,
            **launch_options(pdl),
        )
    return x_THD


def _narrow(shape: Sequence[int], device: torch.device) -> QuantizedActivation:
    """Return room for rows of 8-bit floats and their scales."""
    values = torch.empty(tuple(shape), dtype=torch.float8_e4m3fn, device=device)
    return QuantizedActivation(values, torch.empty(tuple(shape[:-1]), dtype=torch.float32, device=device))


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as a matrix with contiguous rows; copies only what cannot be viewed so."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """Return (tensor, inner count, outer stride, inner stride) of its rows."""
    if x.dim() == 3 and x.stride(-1) == 1:
        return x, x.shape[1], x.stride(0), x.stride(1)
    flat = _flat(x)
    return flat, 1, flat.stride(0), 0


LAUNCHERS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "silu_and_mul": partial(gated, "silu"),
    "gelu_and_mul": partial(gated, "gelu"),
    "gelu_tanh_and_mul": partial(gated, "gelu_tanh"),
    "rotary": rotary,
    "rms_norm_quant": rms_norm_quant,
    "fused_add_rms_norm_quant": fused_add_rms_norm_quant,
    "silu_and_mul_quant": partial(gated_quant, "silu"),
    "gelu_and_mul_quant": partial(gated_quant, "gelu"),
    "gelu_tanh_and_mul_quant": partial(gated_quant, "gelu_tanh"),
}
"""Every op of :data:`jackfield.interfaces.OPS` and :data:`jackfield.interfaces.QUANTIZING_OPS`."""
