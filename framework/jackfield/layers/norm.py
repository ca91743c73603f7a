"""Norm layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from jackfield.layers.parameters import PlainWeight

Ops = Mapping[str, Callable[..., Any]]


class Fed(Protocol):
    """A layer that takes rows."""

    def takes_narrow(self, rows: int) -> bool:
        """Return whether it likes that many rows best in 8-bit floats with a scale each."""
        ...


class RmsNorm(PlainWeight):
    """Root-mean-square norm with an optional offset on the weight (Gemma stores weight - 1). Its results are quantized
    where the layer that it feeds likes that.
    """

    weight: torch.nn.Parameter

    def __init__(
        self, name: str, size: int, eps: float, ops: Ops, dtype: torch.dtype, device: torch.device, offset: float = 0.0
    ) -> None:
        super().__init__(name, {"weight": (size,)}, dtype, device)
        self.eps = eps
        self._offset = offset
        self._norm = ops["rms_norm"]
        self._add_norm = ops["fused_add_rms_norm"]
        self._norm_quant = ops.get("rms_norm_quant")
        self._add_norm_quant = ops.get("fused_add_rms_norm_quant")
        self._fed: Fed | None = None

    def feed(self, layer: Fed) -> None:
        """Say that ``layer`` alone takes what this norm returns."""
        self._fed = layer if self._norm_quant is not None else None

    def finalize(self) -> None:
        """Fold the offset into the weight."""
        if self._offset:
            self.weight.data += self._offset
            self._offset = 0.0

    def forward(self, x: torch.Tensor) -> Any:
        """Return the norm over the last dimension."""
        norm = self._norm if self._fed is None or not self._fed.takes_narrow(len(x)) else self._norm_quant
        assert norm is not None, "only a norm that can quantize feeds a layer"
        return norm(x, self.weight, self.eps)

    def add(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Return (norm(x + residual), x + residual)."""
        norm = self._add_norm if self._fed is None or not self._fed.takes_narrow(len(x_TE)) else self._add_norm_quant
        assert norm is not None, "only a norm that can quantize feeds a layer"
        pair: tuple[Any, torch.Tensor] = norm(x_TE, residual_TE, self.weight, self.eps)
        return pair


class LayerNorm(PlainWeight):
    """Layer norm with weight and bias."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter

    def __init__(self, name: str, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(name, {"weight": (size,), "bias": (size,)}, dtype, device)
        self.eps = eps

    def feed(self, layer: Fed) -> None:
        """There is no quantizing form of this norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm over the last dimension."""
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)

    def add(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual)."""
        total = x_TE + residual_TE
        return self(total), total
