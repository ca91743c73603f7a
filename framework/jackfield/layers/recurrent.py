"""A layer that mixes tokens through a state per sequence: Mamba, linear attention, gated delta networks.

The backend owns the states: what a short convolution needs of the last tokens, and the recurrent state. Legend: T
tokens, C channels of the convolution, W its width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from jackfield.interfaces import ForwardContext
from jackfield.layers.parameters import ShardedWeight


class Recurrent(nn.Module):
    """Mixes through the backend's states. ``index`` is the layer, ``name`` the metadata's."""

    def __init__(self, index: int, name: str, backend: Any) -> None:
        super().__init__()
        self.index, self.group, self.backend = index, name, backend

    def convolve(self, x_TC: torch.Tensor, weights: ShardedWeight, ctx: ForwardContext) -> torch.Tensor:
        """Return silu(causal convolution of each channel over its last W tokens), [T, C].

        Args:
            x_TC: new tokens. weights: ``weight`` [C, 1, W], and ``bias`` [C] or none. ctx: of this step.
        """
        cache, backend, out_TC = ctx.cache(self.index), self.backend, torch.empty_like(x_TC)
        weight_CW = weights.get_parameter("weight").squeeze(1)
        bias_C = weights._parameters.get("bias")

        def work(metadata: Any, count: int) -> None:
            backend.convolve(x_TC[:count], weight_CW, bias_C, cache, metadata, out_TC[:count])

        ctx.unrecorded(self.group, work)
        return out_TC

    def mix(
        self,
        tokens: Mapping[str, torch.Tensor],
        constants: Mapping[str, torch.Tensor],
        out: torch.Tensor,
        ctx: ForwardContext,
    ) -> torch.Tensor:
        """Advance the states by the new tokens and return ``out``, filled.

        Args:
            tokens: inputs whose first dimension is T. constants: the layer's parameters. Names are those of the kind.
            out: [T, ...]. ctx: of this step.
        """
        cache, backend = ctx.cache(self.index), self.backend

        def work(metadata: Any, count: int) -> None:
            inputs = {name: tensor[:count] for name, tensor in tokens.items()}
            backend.mix({**inputs, **constants}, cache, metadata, out[:count])

        ctx.unrecorded(self.group, work)
        return out
