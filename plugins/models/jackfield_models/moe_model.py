"""A router with its experts in torch. Legend: T tokens, E width, X experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from jackfield.interfaces import BuildContext
from jackfield_models.moe_parts import Sparse


class SparseMlp(nn.Module):
    """Routed experts, and experts for every token beside them.

    Args:
        path: of the layer. width: E. sparse: what there is. ctx: builds. shared: the MLP for every token, or None.
    """

    def __init__(self, path: str, width: int, sparse: Sparse, ctx: BuildContext, shared: nn.Module | None) -> None:
        super().__init__()
        count = sparse.experts.num_experts + sparse.experts.zero_experts
        self._router_type = getattr(torch, sparse.router_dtype) if sparse.router_dtype else ctx.dtype
        self.router = ctx.linear(
            f"{path}.router", width, count, bias=sparse.router_bias, quantized=False, dtype=self._router_type
        )
        self.choice_bias: Any = None
        if sparse.choice_bias:
            shape = {"weight": sparse.choice_bias}
            self.choice_bias = ctx.parameters(f"{path}.choice_bias", shape, dtype=torch.float32)
        self.experts = ctx.moe(f"{path}.experts", sparse.experts)
        self.latent_in: Any = None
        self.latent_out: Any = None
        if sparse.latent:
            self.latent_in = ctx.linear(f"{path}.latent_in", width, sparse.latent)
            self.latent_out = ctx.linear(f"{path}.latent_out", sparse.latent, width)
        self.shared = shared
        self.shared_gate: Any = None
        if sparse.shared_gate:
            self.shared_gate = ctx.parameters(f"{path}.shared_gate", {"weight": (1, width)})

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        """Return what the experts add, [T, E]."""
        logits_TX = self.router(x_TE.to(self._router_type))
        bias_X = None if self.choice_bias is None else self.choice_bias.weight.flatten()
        shared: Callable[[torch.Tensor], torch.Tensor] | None = None if self.shared is None else self._for_all
        if self.latent_in is None:
            out_TE: torch.Tensor = self.experts(x_TE, logits_TX, bias_X, shared)
            return out_TE
        out_TE = self.latent_out(self.experts(self.latent_in(x_TE), logits_TX, bias_X, None))
        return out_TE if shared is None else out_TE + shared(x_TE)

    def _for_all(self, x_TE: torch.Tensor) -> torch.Tensor:
        """Return what the experts for every token add."""
        assert self.shared is not None
        out_TE: torch.Tensor = self.shared(x_TE)
        if self.shared_gate is None:
            return out_TE
        return out_TE * torch.sigmoid(F.linear(x_TE, self.shared_gate.weight))
