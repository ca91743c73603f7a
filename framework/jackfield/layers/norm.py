"""Norm layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from jackfield.layers.parameters import PlainWeight

Ops = Mapping[str, Callable[..., Any]]


class RmsNorm(PlainWeight):
    """Root-mean-square norm with an optional offset on the weight (Gemma stores weight - 1)."""

    weight: torch.nn.Parameter

    def __init__(
        self, name: str, size: int, eps: float, ops: Ops, dtype: torch.dtype, device: torch.device, offset: float = 0.0
    ) -> None:
        super().__init__(name, {"weight": (size,)}, dtype, device)
        self.eps = eps
        self._offset = offset
        self._norm = ops["rms_norm"]
        self._add_norm = ops["fused_add_rms_norm"]

    def finalize(self) -> None:
        """Fold the offset into the weight."""
        if self._offset:
            self.weight.data += self._offset
            self._offset = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm over the last dimension."""
        out: torch.Tensor = self._norm(x, self.weight, self.eps)
        return out

    def add(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual)."""
        pair: tuple[torch.Tensor, torch.Tensor] = self._add_norm(x_TE, residual_TE, self.weight, self.eps)
        return pair


class LayerNorm(PlainWeight):
    """Layer norm with weight and bias."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter

    def __init__(self, name: str, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(name, {"weight": (size,), "bias": (size,)}, dtype, device)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm over the last dimension."""
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)

    def add(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual)."""
        total = x_TE + residual_TE
        return self(total), total
