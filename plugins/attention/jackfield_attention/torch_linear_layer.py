"""Linear attention and the gated delta rule in plain torch. Legend: T tokens, G key heads, H value heads (a multiple of
them), K key size, V value size.
"""

from __future__ import annotations

import torch

from jackfield_attention.state_steps import Inputs, State, StateLayer, StateMetadata

LENGTH_EPS = 1e-6


class LinearLayer(StateLayer):
    """Inputs: ``q``, ``k`` [T, G, K], ``v`` [T, H, V]; ``g`` [H], the logarithm of the decay of each head."""

    def mix(self, inputs: Inputs, state: State, metadata: StateMetadata, out: torch.Tensor) -> None:
        """See RecurrentLayer. ``out`` is [T, H, V]."""
        v = inputs["v"].float()
        q, k = (_spread(inputs[name].float(), v.shape[1]) for name in ("q", "k"))
        g = inputs["g"].float().expand(len(v), -1)
        self.advance("decayed", (q, k, v, g), state["state"], metadata, out)


class DeltaLayer(StateLayer):
    """Inputs: ``q``, ``k`` [T, G, K] (brought to length 1 here, and q scaled by K^-1/2), ``v`` [T, H, V], ``beta``
    [T, H], and logarithms of decays ``g``: [T, H] (``gdn``) or [T, H, K] (``kda``).
    """

    def mix(self, inputs: Inputs, state: State, metadata: StateMetadata, out: torch.Tensor) -> None:
        """See RecurrentLayer. ``out`` is [T, H, V]."""
        v, g, beta = (inputs[name].float() for name in ("v", "g", "beta"))
        q, k = (_spread(_unit(inputs[name].float()), v.shape[1]) for name in ("q", "k"))
        q = q * q.shape[-1] ** -0.5
        decays = g if g.dim() == 3 else g.unsqueeze(-1)
        self.advance("delta", (q, k, v, decays, beta), state["state"], metadata, out)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)


def _spread(x_TGK: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [T, H, K]: neighbouring heads share a key head."""
    return x_TGK.repeat_interleave(heads // x_TGK.shape[1], 1)
