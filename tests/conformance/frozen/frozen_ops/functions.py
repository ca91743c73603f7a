"""The work, in torch. T tokens, E width."""

import torch


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight; computed in float32, and rounded before the weight."""
    wide = x_TE.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x_TE.dtype) * weight_E
