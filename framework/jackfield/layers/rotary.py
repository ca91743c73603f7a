"""Rotary position embedding: tables of angles. Legend: P positions, R rotary size, T tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from jackfield.errors import ConfigError, did_you_mean

SCALINGS = ("default", "linear", "llama3")


class Rotary(nn.Module):
    """Angles for one kind of rotary embedding; shared by all layers that rotate alike."""

    table_PR: torch.Tensor

    def __init__(
        self,
        rotary_dim: int,
        theta: float,
        scaling: Mapping[str, Any] | None,
        max_position: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        frequencies = scaled_frequencies(rotary_dim, theta, scaling)
        positions = torch.arange(max_position, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        self.register_buffer("table_PR", torch.cat((angles.cos(), angles.sin()), dim=-1).to(device), persistent=False)

    def forward(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Return cosines and sines [T, R] of the positions, in float32."""
        return self.table_PR.index_select(0, positions_T)


def scaled_frequencies(rotary_dim: int, theta: float, scaling: Mapping[str, Any] | None) -> torch.Tensor:
    """Return the inverse wavelengths [R/2] after scaling.

    Args:
        rotary_dim: R. theta: base. scaling: HF's ``rope_scaling`` (or ``rope_parameters``) object, or None.

    Raises:
        ConfigError: the scaling type is unknown.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    frequencies = 1.0 / (theta**exponents)
    if scaling is None:
        return frequencies
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(scaling["factor"])
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    if kind == "factors":
        return frequencies / torch.tensor(scaling["factors"], dtype=torch.float32)
    raise ConfigError(
        f"rotary scaling '{kind}' is not known",
        field="rope_scaling.rope_type",
        value=kind,
        remedy=did_you_mean(str(kind), SCALINGS) or f"known: {', '.join(SCALINGS)}",
    )


def _llama3(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1's rule: long waves are stretched by ``factor``, short ones stay, those between are blended."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    waves = 2 * math.pi / frequencies
    blend = (original / waves - low) / (high - low)
    smooth = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(waves > original / low, frequencies / factor, smooth)
    return torch.where(waves < original / high, frequencies, scaled)
