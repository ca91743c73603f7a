"""Published layouts back to plain numbers, expert by expert: the reference for every kernel that reads them.

Legend: O outputs, I inputs, J groups of inputs.
"""

from __future__ import annotations

import torch

from jackfield.interfaces.moe import ExpertMatrices

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of four bits, sign first (OCP Microscaling 1.0)."""


def matrix_of(matrices: ExpertMatrices, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """Return one expert's matrix [O, I] in ``dtype``."""
    stored = matrices.weight[expert]
    if matrices.layout == "dense":
        return stored.to(dtype)
    assert matrices.scale is not None, "all other layouts have scales"
    scale = matrices.scale[expert]
    if matrices.layout == "mxfp4":
        numbers = torch.tensor(E2M1, device=stored.device)[_halves(stored).long()]
        return _scaled(numbers, torch.exp2(scale.float() - 127.0)).to(dtype)
    if matrices.layout != "int4":
        return _scaled(stored.float(), scale.float()).to(dtype)
    zero = None if matrices.zero is None else matrices.zero[expert].float()
    whole = _halves(stored).float()
    less = torch.tensor(8.0, device=stored.device) if zero is None else _spread(zero, whole)
    return _scaled(whole - less, scale.float()).to(dtype)


def _halves(stored: torch.Tensor) -> torch.Tensor:
    """Return [O, I] numbers of four bits out of [O, I / 2] bytes."""
    return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(1)


def _scaled(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return numbers * _spread(scale, numbers)


def _spread(scale: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return a scale for each number; the last block may be cut short."""
    rows, columns = (-(-n // s) for n, s in zip(numbers.shape, scale.shape, strict=True))
    wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: numbers.shape[0], : numbers.shape[1]]
