"""Rotary position embedding: tables of angles. Legend: P positions, R rotary size, T tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from jackfield.errors import ConfigError
from jackfield.layers.rotary_scaling import attention_factor, scaled_frequencies

__all__ = ["Rotary", "scaled_frequencies"]


class Rotary(nn.Module):
    """Angles for one kind of rotary embedding; shared by all layers that rotate alike.

    Args:
        rotary_dim: R. theta: base. scaling: HF's ``rope_scaling`` object, or None. max_position: longest sequence the
            model was made for. device: of the table. length: longest sequence that will be run; see
            :func:`scaled_frequencies`. reach: positions that are looked up, where those are not all.

    Raises:
        ConfigError: the scaling is unknown or incomplete.
    """

    table_PR: torch.Tensor
    axes_R: torch.Tensor | None

    def __init__(
        self,
        rotary_dim: int,
        theta: float,
        scaling: Mapping[str, Any] | None,
        max_position: int,
        device: torch.device,
        length: int = 0,
        reach: int = 0,
    ) -> None:
        super().__init__()
        frequencies = scaled_frequencies(rotary_dim, theta, scaling, max_position, length)
        positions = torch.arange(reach or max(max_position, length), dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor(scaling, max_position)
        self.register_buffer("table_PR", table.to(device), persistent=False)
        axes = axes_of(rotary_dim, scaling or {})
        self.register_buffer("axes_R", None if axes is None else axes.repeat(2).to(device), persistent=False)

    def forward(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Return cosines and sines [T, R] of positions [T], or [3, T] along time, height and width, in float32."""
        if positions_T.dim() == 1:
            return self.table_PR.index_select(0, positions_T)
        rows_3TR = self.table_PR[positions_T]
        if self.axes_R is None:
            return rows_3TR[0]
        return rows_3TR.gather(0, self.axes_R.expand(1, rows_3TR.shape[1], -1))[0]


def axes_of(rotary_dim: int, scaling: Mapping[str, Any]) -> torch.Tensor | None:
    """Return along which axis each frequency [R/2] looks at a position (0: time, 1: height, 2: width), or None where
    all look along the first.

    ``mrope_section`` (Qwen2-VL, arXiv:2409.12191, section 2.1) gives each axis a run of frequencies; with
    ``mrope_interleaved`` (Qwen3-VL) the axes take turns as far as the sections reach, and time has the rest.

    Raises:
        ConfigError: the sections are not three, or do not add up.
    """
    sections = scaling.get("mrope_section")
    if sections is None:
        return None
    if len(sections) != 3 or sum(sections) != rotary_dim // 2:
        raise ConfigError(
            f"sections {list(sections)} do not share out {rotary_dim // 2} frequencies among three axes",
            field="rope_scaling.mrope_section",
            value=list(sections),
            remedy="correct the configuration",
        )
    if not scaling.get("mrope_interleaved", False):
        return torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    axes = torch.zeros(rotary_dim // 2, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes
