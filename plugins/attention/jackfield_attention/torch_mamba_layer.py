"""Mamba in plain torch. Legend: T tokens, I channels, N states of a channel, H heads, V size of a head, G groups."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from jackfield_attention.state_steps import Inputs, State, StateLayer, StateMetadata


class Mamba1Layer(StateLayer):
    """Inputs: ``x``, ``dt`` [T, I] (before the softplus), ``b``, ``c`` [T, N]; ``a`` [I, N], ``d`` [I]."""

    def mix(self, inputs: Inputs, state: State, metadata: StateMetadata, out: torch.Tensor) -> None:
        """See RecurrentLayer. ``out`` is [T, I]."""
        x, b, c = (inputs[name].float() for name in ("x", "b", "c"))
        dt = F.softplus(inputs["dt"].float())
        self.advance(
            "selective", (x, dt, b, c), state["state"], metadata, out, inputs["d"] * x, constants=(inputs["a"],)
        )


class Mamba2Layer(StateLayer):
    """Inputs: ``x`` [T, H, V], ``dt`` [T, H] (before bias and softplus), ``b``, ``c`` [T, G, N]; ``a``, ``d``,
    ``dt_bias`` [H]. The request's ``extra["dt_limit"]`` bounds the steps.
    """

    def mix(self, inputs: Inputs, state: State, metadata: StateMetadata, out: torch.Tensor) -> None:
        """See RecurrentLayer. ``out`` is [T, H, V]."""
        x, b, c = (inputs[name].float() for name in ("x", "b", "c"))
        dt = F.softplus(inputs["dt"].float() + inputs["dt_bias"])
        if "dt_limit" in self._request.extra:
            dt = dt.clamp(*self._request.extra["dt_limit"])
        repeats = x.shape[1] // b.shape[1]
        q, k = (value.repeat_interleave(repeats, 1) for value in (c, b))
        v, g = x * dt.unsqueeze(-1), dt * inputs["a"]
        skip = inputs["d"].unsqueeze(-1) * x
        self.advance("decayed", (q, k, v, g), state["state"], metadata, out, skip)
