"""What writers of checkpoint formats have in common: numbers of few bits, rounded and packed bit by bit, in the slowest
and plainest way. Legend: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]
"""Tensors of one module by suffix, and the matrix that they stand for, float32 [O, I]."""
Writer = Callable[[torch.Tensor], Written]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column that each nibble of a word holds."""


@dataclass(frozen=True, eq=False)
class Format:
    """One kind of checkpoint.

    Args:
        method: entry-point name of the method that reads it. config: its quantization_config. write: writes a module.
    """

    method: str
    config: Mapping[str, Any]
    write: Writer


def pack_bits(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int32 words of a stream of numbers along the last dimension, the lowest bits first."""
    stream = (rows.long().unsqueeze(-1) >> torch.arange(bits) & 1).flatten(-2)
    filled = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % 32)).numpy().astype(np.uint8)
    return torch.from_numpy(np.packbits(filled, axis=-1, bitorder="little").view("<i4"))


def whole_numbers(weight: torch.Tensor, bits: int, group: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Return (numbers [O, I], scales [O, J], zeros [O, J]) of round-to-nearest, ``group`` being that of each input."""
    top, count = (1 << bits) - 1, int(group.max()) + 1
    parts = [weight[:, group == j] for j in range(count)]
    least = torch.stack([p.amin(1).clamp(max=0) for p in parts], 1)
    most = torch.stack([p.amax(1).clamp(min=0) for p in parts], 1)
    if symmetric:
        scale = torch.maximum(-least, most) * 2 / top
        zero = torch.full_like(scale, (top + 1) // 2)
    else:
        scale = (most - least) / top
        zero = (-least / scale).round().clamp(0, top)
    scale = scale.half().float()
    numbers = (weight / scale[:, group] + zero[:, group]).round().clamp(0, top)
    return numbers.int(), scale, zero.int()


def four_bit_floats(weight: torch.Tensor) -> torch.Tensor:
    """Return the codes of the nearest numbers of E2M1."""
    table = torch.tensor([*E2M1, *(-n for n in E2M1)])
    codes = (weight.unsqueeze(-1) - table).abs().argmin(-1)
    return codes.to(torch.uint8)


def value_of(codes: torch.Tensor) -> torch.Tensor:
    """Return the numbers of E2M1, from sign, exponent and mantissa."""
    sign, exponent, mantissa = 1.0 - 2.0 * (codes >> 3), ((codes >> 1) & 3).float(), (codes & 1).float()
    size = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2 ** (exponent - 1))
    return sign * size


def pairs(codes: torch.Tensor) -> torch.Tensor:
    """Return bytes of two codes, the first in the low half."""
    return codes[..., 0::2] | codes[..., 1::2] << 4
