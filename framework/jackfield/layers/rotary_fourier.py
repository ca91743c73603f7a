"""Fourier position embedding (FoPE, arXiv:2412.17739): each feature turns by a sum of waves instead of one.

Legend: T tokens, K cache heads, W waves that are kept, R rotary size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from jackfield.errors import ConfigError
from jackfield.layers.rotary_scaling import attention_factor, scaled_frequencies


class Coefficients(Protocol):
    """How much of each wave [W] goes into each feature [W]: [W, W], or [K, W, W] with a matrix for each head."""

    cos_coef: torch.Tensor
    sin_coef: torch.Tensor


def kept_waves(rotary_dim: int, theta: float, scaling: Mapping[str, Any], max_position: int) -> torch.Tensor:
    """Return the frequencies [W] that turn: the first ``num_inv_freq`` or, where that is not said, those that complete
    a turn within the longest sequence. The others were never seen whole in training, and stand still.

    Args:
        rotary_dim: R. theta: base. scaling: as for :func:`~jackfield.layers.rotary_scaling.scaled_frequencies`.
            max_position: longest sequence the model was made for.

    Raises:
        ConfigError: as :func:`~jackfield.layers.rotary_scaling.scaled_frequencies`, or no frequency is kept.
    """
    frequencies = scaled_frequencies(rotary_dim, theta, scaling, max_position)
    count = scaling.get("num_inv_freq")
    kept = frequencies[frequencies > 2.0 * math.pi / max_position] if count is None else frequencies[:count]
    if not len(kept):
        raise ConfigError(
            "no frequency of the Fourier position embedding is kept",
            field="rope_scaling.num_inv_freq",
            value=count,
            remedy="correct the model's configuration",
        )
    return kept


class FourierRotary(nn.Module):
    """Cosines and sines that are sums of waves, with coefficients from the checkpoint.

    Args:
        waves_W: frequencies. coefficients: module with the matrices. rotary_dim: R. scaling, max_position: as for
            :class:`~jackfield.layers.rotary.Rotary`. device: of the frequencies.
    """

    waves_W: torch.Tensor

    def __init__(
        self,
        waves_W: torch.Tensor,
        coefficients: nn.Module,
        rotary_dim: int,
        scaling: Mapping[str, Any],
        max_position: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.coefficients: Any = coefficients
        self._still = rotary_dim // 2 - len(waves_W)
        self._factor = attention_factor(scaling, max_position)
        self.register_buffer("waves_W", waves_W.to(device), persistent=False)

    def forward(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Return cosines and sines in float32, [T, R], or [T, K, R] where heads have their own; of positions [3, T] the
        first are meant.
        """
        first_T = positions_T if positions_T.dim() == 1 else positions_T[0]
        angles_TW = first_T.unsqueeze(-1) * self.waves_W
        weights: Coefficients = self.coefficients
        parts = (self._mixed(angles_TW.cos(), weights.cos_coef), self._mixed(angles_TW.sin(), weights.sin_coef))
        return torch.cat(parts, -1) * self._factor

    def _mixed(self, waves_TW: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        # What stands still has cosine and sine 1, and not an angle of 0: models are trained so, and use it.
        return nn.functional.pad(_products(waves_TW, matrix), (0, self._still), value=1.0)


def _products(waves_TW: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return [T, W], or [T, K, W] for a matrix with heads in front."""
    return waves_TW @ matrix if matrix.dim() == 2 else (waves_TW @ matrix).transpose(0, 1)
