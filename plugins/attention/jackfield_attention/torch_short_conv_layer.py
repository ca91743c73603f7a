"""Short convolutions in plain torch. Legend: T tokens, C channels, W width."""

from __future__ import annotations

import torch

from jackfield_attention.state_steps import Inputs, State, StateLayer, StateMetadata, convolve, same


class ShortConvLayer(StateLayer):
    """Inputs: ``x`` [T, C]; ``weight`` [C, W], and ``bias`` [C] where there is one."""

    def mix(self, inputs: Inputs, state: State, metadata: StateMetadata, out: torch.Tensor) -> None:
        """See RecurrentLayer. ``out`` is [T, C]: sums over the last W tokens, without an activation."""
        convolve(inputs["x"], inputs["weight"], inputs.get("bias"), state["conv"], metadata, out, same)
