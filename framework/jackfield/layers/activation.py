"""Gated activations over a fused gate and up projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jackfield.errors import ConfigError, did_you_mean

GATED = {
    "silu": "silu_and_mul",
    "swish": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_pytorch_tanh": "gelu_tanh_and_mul",
    "gelu_tanh": "gelu_tanh_and_mul",
    "gelu_new": "gelu_tanh_and_mul",
}
"""HF's activation names and the op that each is."""


def gated_activation(name: str, ops: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the op ``[T, 2F] -> [T, F]`` for an HF activation name.

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
    return ops[GATED[name]]
