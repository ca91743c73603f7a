"""Rotary position embedding: tables of angles. Legend: P positions, R rotary size, T tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from jackfield.layers.rotary_scaling import attention_factor, scaled_frequencies

__all__ = ["Rotary", "scaled_frequencies"]


class Rotary(nn.Module):
    """Angles for one kind of rotary embedding; shared by all layers that rotate alike.

    Args:
        rotary_dim: R. theta: base. scaling: HF's ``rope_scaling`` object, or None. max_position: longest sequence the
            model was made for. device: of the table. length: longest sequence that will be run; see
            :func:`scaled_frequencies`.

    Raises:
        ConfigError: the scaling is unknown or incomplete.
    """

    table_PR: torch.Tensor

    def __init__(
        self,
        rotary_dim: int,
        theta: float,
        scaling: Mapping[str, Any] | None,
        max_position: int,
        device: torch.device,
        length: int = 0,
    ) -> None:
        super().__init__()
        frequencies = scaled_frequencies(rotary_dim, theta, scaling, max_position, length)
        positions = torch.arange(max(max_position, length), dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor(scaling, max_position)
        self.register_buffer("table_PR", table.to(device), persistent=False)

    def forward(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Return cosines and sines [T, R] of the positions, in float32."""
        return self.table_PR.index_select(0, positions_T)
