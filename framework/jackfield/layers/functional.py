"""Torch references of the published ops. Legend: T tokens, E width, F intermediate, H heads, D head size, R rotary
size.

Each is exact in float32 and the measure for every faster implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm (arXiv:1910.07467) over the last dimension, computed in float32 for narrower types.

    Written out: on a CPU torch's own takes as long for one row and nine times as long for 512 (of 576 features).
    """
    narrow = x_TE.dtype not in (torch.float32, torch.float64)
    wide = x_TE.float() if narrow else x_TE
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return normal.to(x_TE.dtype) * weight_E if narrow else normal.mul_(weight_E)


def fused_add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(x + residual), x + residual)."""
    total = x_TE + residual_TE
    return rms_norm(total, weight_E, eps), total


def silu_and_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of ``[gate, up]`` (SwiGLU, arXiv:2002.05202)."""
    gate, up = x_T2F.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up with the exact (erf) gelu."""
    gate, up = x_T2F.chunk(2, dim=-1)
    return F.gelu(gate).mul_(up)


def gelu_tanh_and_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up with the tanh form of gelu."""
    gate, up = x_T2F.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def rotary(x_THD: torch.Tensor, cos_sin_TR: torch.Tensor) -> torch.Tensor:
    """Rotate the first R features of every head in place, pairs being (i, i + R/2) (RoFormer, arXiv:2104.09864).

    Args:
        x_THD: heads, queries and keys together; features past R stay as they are.
        cos_sin_TR: cosines then sines of each token's angles, R/2 each, in float32.
    """
    size = cos_sin_TR.shape[-1]
    cos, sin = cos_sin_TR.unsqueeze(1).chunk(2, dim=-1)
    first, second = x_THD[..., :size].chunk(2, dim=-1)
    wide = torch.promote_types(x_THD.dtype, cos.dtype)
    cos, sin, low, high = (part.to(wide) for part in (cos, sin, first, second))
    new_first = (low * cos).addcmul_(high, sin, value=-1)
    new_second = (high * cos).addcmul_(low, sin)
    first.copy_(new_first)
    second.copy_(new_second)
    return x_THD


REFERENCES: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "silu_and_mul": silu_and_mul,
    "gelu_and_mul": gelu_and_mul,
    "gelu_tanh_and_mul": gelu_tanh_and_mul,
    "rotary": rotary,
}
"""Every op of :data:`jackfield.interfaces.OPS`."""
