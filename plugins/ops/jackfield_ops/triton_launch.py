"""Launchers of the Triton layer ops, with the signatures of the torch references, and ``pdl`` (see
``jackfield_triton.launch``).

Legend: T tokens, E width, F intermediate, H heads, D head size, R rotary size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from jackfield_ops.triton_kernels import fused_add_rms_norm_kernel, gated_kernel, rms_norm_kernel, rotary_kernel
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
    width = x_TE.shape[-1]
    out = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    rows = out.numel() // width if width else 0
    if not rows:
        return out
    x, inner, stride_outer, stride_inner = _rows(x_TE)
    block, tall, warps = row_tile(rows, width)
    rms_norm_kernel[(-(-rows // tall),)](
        x,
        weight_E,
        out,
        rows,
        inner,
        stride_outer,
        stride_inner,
        eps,
        WIDTH=width,
        BLOCK=block,
        ROWS=tall,
        num_warps=warps,
        **launch_options(pdl),
    )
    return out


def fused_add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(x + residual), x + residual), both new."""
    width = x_TE.shape[-1]
    out, total = (torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device) for _ in range(2))
    rows = out.numel() // width if width else 0
    if not rows:
        return out, total
    x, residual = _flat(x_TE), _flat(residual_TE)
    block, tall, warps = row_tile(rows, width)
    fused_add_rms_norm_kernel[(-(-rows // tall),)](
        x,
        residual,
        weight_E,
        out,
        total,
        rows,
        x.stride(0),
        residual.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        ROWS=tall,
        num_warps=warps,
        **launch_options(pdl),
    )
    return out, total


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
}
"""Every op of :data:`jackfield.interfaces.OPS`."""
