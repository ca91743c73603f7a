"""Torch references of the published ops. Legend: T tokens, E width, F intermediate, H heads, D head size, R rotary
size.

Each is exact in float32 and the measure for every faster implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from jackfield.interfaces import PendingNorm, QuantizedActivation
from jackfield.layers import step_ops
from jackfield.layers.routing import route
from jackfield.sampling.draw import draw_tokens


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


def settled(x_TE: torch.Tensor | PendingNorm) -> torch.Tensor:
    """Return rows after the norm that is pending, if one is; what it is to leave elsewhere is not touched."""
    if not isinstance(x_TE, PendingNorm):
        return x_TE
    total = x_TE.x if x_TE.residual is None else x_TE.x + x_TE.residual
    return rms_norm(total, x_TE.weight, x_TE.eps)


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


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Return ``cap * tanh(x / cap)``, in place: numbers near 0 stay as they are, none is above ``cap`` (Gemma 2)."""
    return x.div_(cap).tanh_().mul_(cap)


FP8_LARGEST = 448.0
"""The largest number of float8_e4m3fn."""
SMALLEST_SCALE = 1e-12
"""Keeps rows of zeros from dividing by zero."""


def quantize_rows(x_TN: torch.Tensor) -> QuantizedActivation:
    """Return float8_e4m3fn rows with a float32 scale each: the largest number of a row becomes the type's largest."""
    wide = x_TN.float()
    scale_T = (wide.abs().amax(-1) / FP8_LARGEST).clamp_min(SMALLEST_SCALE)
    values = (wide / scale_T.unsqueeze(-1)).clamp(-FP8_LARGEST, FP8_LARGEST)
    return QuantizedActivation(values.to(torch.float8_e4m3fn), scale_T)


def rms_norm_quant(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> QuantizedActivation:
    """Return :func:`rms_norm`, quantized row by row."""
    return quantize_rows(rms_norm(x_TE, weight_E, eps))


def fused_add_rms_norm_quant(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[QuantizedActivation, torch.Tensor]:
    """Return (norm(x + residual), quantized row by row, and x + residual)."""
    normal, total = fused_add_rms_norm(x_TE, residual_TE, weight_E, eps)
    return quantize_rows(normal), total


def _gated_quant(gated: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], QuantizedActivation]:
    return lambda x_T2F: quantize_rows(gated(x_T2F))


REFERENCES: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "silu_and_mul": silu_and_mul,
    "gelu_and_mul": gelu_and_mul,
    "gelu_tanh_and_mul": gelu_tanh_and_mul,
    "rotary": rotary,
    "rms_norm_quant": rms_norm_quant,
    "fused_add_rms_norm_quant": fused_add_rms_norm_quant,
    "silu_and_mul_quant": _gated_quant(silu_and_mul),
    "gelu_and_mul_quant": _gated_quant(gelu_and_mul),
    "gelu_tanh_and_mul_quant": _gated_quant(gelu_tanh_and_mul),
    "draw_tokens": draw_tokens,
    "route_experts": route,
    "greedy_tokens": step_ops.greedy_tokens,
    "token_inputs": step_ops.token_inputs,
    "begin_round": step_ops.begin_round,
    "keep_tokens": step_ops.keep_tokens,
    "end_round": step_ops.end_round,
}
"""Every op of :data:`jackfield.interfaces.OPS`, :data:`~jackfield.interfaces.QUANTIZING_OPS`,
:data:`~jackfield.interfaces.SAMPLING_OPS`, :data:`~jackfield.interfaces.ROUTING_OPS` and
:data:`~jackfield.interfaces.STEP_OPS`.
"""
