"""What experts do between their two products. Legend: N rows, F inner."""

from __future__ import annotations

from collections.abc import Callable

import torch

from jackfield.interfaces import ExpertsRequest
from jackfield.layers.activation import GATED, GatedActivation, PlainActivation
from jackfield.layers.functional import REFERENCES

Activation = Callable[[torch.Tensor], torch.Tensor]


def activation_of(request: ExpertsRequest) -> Activation:
    """Return the function from [N, 2F], or [N, F] where experts are not gated, to [N, F].

    Raises:
        ConfigError: the activation is unknown.
    """
    if request.activation == "swiglu_oai":
        return lambda x: swiglu_oai(x, request.alpha, request.limit)
    if request.gated:
        return GatedActivation(request.activation, {op: REFERENCES[op] for op in set(GATED.values())})
    return PlainActivation(request.activation)


def swiglu_oai(x_N2F: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Return gpt-oss's gated activation, ``(up + 1) * gate * sigmoid(alpha * gate)`` of clamped numbers."""
    gate, up = x_N2F.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)
