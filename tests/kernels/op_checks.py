"""Inputs for the layer ops, and how near a kernel must come to the torch reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest relative error, in the Euclidean norm."""


def draw(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Return normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Say whether two results agree to the rounding of their type."""
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    gap = (found.double() - wanted.double()).norm() / wanted.double().norm()
    return bool(gap < BOUNDS[found.dtype])


def norm_views(dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Return inputs of a norm over 48 and other features: whole, strided, with many leading dimensions, wide."""
    fused = draw(7, 6 * 48, dtype=dtype, device=device)
    return {
        "matrix": draw(5, 48, dtype=dtype, device=device),
        "one row": draw(1, 4096, dtype=dtype, device=device),
        "one feature": draw(3, 1, dtype=dtype, device=device),
        "heads of a fused projection": fused[:, : 4 * 48].view(7, 4, 48),
        "rows of a wider matrix": fused[:, 5 : 5 + 64],
        "four dimensions": draw(2, 3, 2, 48, dtype=dtype, device=device),
        "many rows": draw(1100, 16, dtype=dtype, device=device),
        "transposed": draw(48, 5, dtype=dtype, device=device).t(),
    }


def angles_of(tokens: int, size: int, device: str = "cpu") -> torch.Tensor:
    """Return cosines then sines [T, R]."""
    angles = torch.rand(tokens, size // 2, generator=torch.Generator().manual_seed(1)) * 6
    return torch.cat((angles.cos(), angles.sin()), 1).to(device)


def same_rotation(
    ours: Callable[..., Any], theirs: Callable[..., Any], x: torch.Tensor, size: int, part: slice
) -> bool:
    """Rotate heads ``part`` of ``x`` [T, H, D] in place both ways and compare the whole."""
    cos_sin = angles_of(len(x), size, str(x.device))
    mine, wanted = x.clone(), x.clone()
    returned = ours(mine[:, part], cos_sin)
    theirs(wanted[:, part], cos_sin)
    return returned.data_ptr() == mine[:, part].data_ptr() and near(mine, wanted)
