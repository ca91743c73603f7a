"""What experts do between their two products. Legend: N rows, F inner."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from jackfield.interfaces import ExpertsRequest
from jackfield.layers.activation import GATED, GatedActivation, PlainActivation
from jackfield.layers.functional import REFERENCES

Activation = Callable[[torch.Tensor], torch.Tensor]


def activation_of(request: ExpertsRequest) -> Activation:
    """Return the function from [N, 2F], or [N, F] where experts are not gated, to [N, F].

    Raises:
        ConfigError: the activation is unknown.
    """
    if request.activation in LIMITED:
        limited = LIMITED[request.activation]
        return lambda x: limited(x, request.alpha, request.limit)
    if request.gated:
        return GatedActivation(request.activation, {op: REFERENCES[op] for op in set(GATED.values())})
    return PlainActivation(request.activation)


def swiglu_oai(x_N2F: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Return gpt-oss's gated activation, ``(up + 1) * gate * sigmoid(alpha * gate)`` of clamped numbers."""
    gate, up = x_N2F.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def swiglu_step(x_N2F: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Return Step-3.5's gated activation, ``silu(gate) * up``, of which the first is at most ``limit`` and the second
    between its negative and it.
    """
    gate, up = x_N2F.chunk(2, dim=-1)
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def situ(x_N2F: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Return the gated activation of sigmoid and tanh, ``alpha * tanh(gate / alpha) * sigmoid(gate) * up``, computed in
    float32; ``limit`` bounds up in the same way, and 0 leaves it as it is.
    """
    gate, up = x_N2F.float().chunk(2, dim=-1)
    if limit:
        up = limit * torch.tanh(up / limit)
    return (alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate) * up).to(x_N2F.dtype)


LIMITED: Mapping[str, Callable[[torch.Tensor, float, float], torch.Tensor]] = {
    "swiglu_oai": swiglu_oai,
    "swiglu_step": swiglu_step,
    "situ": situ,
}
"""Gated activations that take ``alpha`` and ``limit`` of the block."""
