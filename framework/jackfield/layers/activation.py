"""Gated activations over a fused gate and up projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from jackfield.errors import ConfigError, did_you_mean
from jackfield.layers.norm import Fed

GATED = {
    "silu": "silu_and_mul",
    "swish": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_pytorch_tanh": "gelu_tanh_and_mul",
    "gelu_tanh": "gelu_tanh_and_mul",
    "gelu_new": "gelu_tanh_and_mul",
}
"""HF's activation names and the op that each is."""


class GatedActivation:
    """``[T, 2F] -> [T, F]``: an activation of the first half of each row times the second half. Its results are
    quantized where the layer that it feeds likes that.

    Args:
        name: HF's name. ops: chosen implementations.

    Raises:
        ConfigError: the name is unknown.
    """

    def __init__(self, name: str, ops: Mapping[str, Callable[..., Any]]) -> None:
        op = gated_op(name)
        self._plain, self._quant = ops[op], ops.get(f"{op}_quant")
        self._fed: Fed | None = None

    def feed(self, layer: Fed) -> None:
        """Say that ``layer`` alone takes what this activation returns."""
        self._fed = layer if self._quant is not None else None

    def __call__(self, x_T2F: torch.Tensor) -> Any:
        """Return [T, F]."""
        if self._fed is not None and self._quant is not None and self._fed.takes_narrow(len(x_T2F)):
            return self._quant(x_T2F)
        return self._plain(x_T2F)


def gated_op(name: str) -> str:
    """Return the op of an HF activation name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in GATED:
        raise ConfigError(
            f"the activation '{name}' is not known",
            field="hidden_act",
            value=name,
            remedy=did_you_mean(name, GATED) or f"known: {', '.join(sorted(GATED))}",
        )
    return GATED[name]
