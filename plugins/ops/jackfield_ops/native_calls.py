"""Calls of the layer ops in C, with the signatures of the torch references; float32 on a CPU.

Legend: T tokens, E width, F intermediate, H heads, D head size, R rotary size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from jackfield_native.library import GATES, kernels


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension of any tensor; a view with strided rows is read as it is."""
    out = torch.empty(x_TE.shape, dtype=torch.float32)
    width = x_TE.shape[-1]
    x, inner, outer_stride, inner_stride = _rows(x_TE)
    kernels().jf_rms_norm(
        x.data_ptr(),
        weight_E.data_ptr(),
        out.data_ptr(),
        out.numel() // max(1, width),
        inner,
        outer_stride,
        inner_stride,
        width,
        eps,
        torch.get_num_threads(),
    )
    return out


def fused_add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(x + residual), x + residual), both new."""
    out, total = torch.empty(x_TE.shape, dtype=torch.float32), torch.empty(x_TE.shape, dtype=torch.float32)
    x, residual = _flat(x_TE), _flat(residual_TE)
    kernels().jf_add_rms_norm(
        x.data_ptr(),
        residual.data_ptr(),
        weight_E.data_ptr(),
        out.data_ptr(),
        total.data_ptr(),
        x.shape[0],
        x.stride(0),
        residual.stride(0),
        x.shape[1],
        eps,
        torch.get_num_threads(),
    )
    return out, total


def gated(kind: int, x_T2F: torch.Tensor) -> torch.Tensor:
    """Return activation(gate) * up of ``[gate, up]``; ``kind`` is a number of ``GATES``."""
    width = x_T2F.shape[-1] // 2
    out = torch.empty((*x_T2F.shape[:-1], width), dtype=torch.float32)
    x = _flat(x_T2F)
    kernels().jf_gated(kind, x.data_ptr(), out.data_ptr(), x.shape[0], x.stride(0), width, torch.get_num_threads())
    return out


def rotary(x_THD: torch.Tensor, cos_sin_TR: torch.Tensor) -> torch.Tensor:
    """Rotate the first R features of every head in place, pairs being (i, i + R/2). Heads may be strided."""
    tokens, heads = x_THD.shape[:2]
    assert x_THD.stride(-1) == 1
    assert cos_sin_TR.stride(-1) == 1
    kernels().jf_rotary(
        x_THD.data_ptr(),
        cos_sin_TR.data_ptr(),
        tokens,
        heads,
        *x_THD.stride()[:2],
        cos_sin_TR.stride(0),
        cos_sin_TR.shape[-1] // 2,
        torch.get_num_threads(),
    )
    return x_THD


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as a matrix with contiguous rows; copies only what cannot be viewed so."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """Return (tensor, inner count, outer stride, inner stride) of its rows."""
    if x.dim() == 3 and x.stride(-1) == 1:
        return x, max(1, x.shape[1]), x.stride(0), x.stride(1)
    flat = _flat(x)
    return flat, 1, flat.stride(0), 0


CALLS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "silu_and_mul": partial(gated, GATES["silu"]),
    "gelu_and_mul": partial(gated, GATES["gelu"]),
    "gelu_tanh_and_mul": partial(gated, GATES["gelu_tanh"]),
    "rotary": rotary,
}
"""Every op of :data:`jackfield.interfaces.OPS`."""
