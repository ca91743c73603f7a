"""The reference experts backend: tokens grouped by expert, one grouped product per matrix. Legend: T tokens, S
chosen, X experts, E width, F inner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import Band, ExpertsBackend, ExpertsRequest, Preference

if TYPE_CHECKING:
    import torch


class TorchExperts(ExpertsBackend):
    """Plain torch, any device; loops over experts that have tokens, never over tokens."""

    name = "torch"
    summary = "torch reference of routed experts"
    kinds: ClassVar[frozenset[str]] = frozenset({"dense"})

    def __init__(self, activation: str) -> None:
        self._activation = activation

    @classmethod
    def preference(cls, request: ExpertsRequest) -> Preference:
        """Return FALLBACK."""
        return Preference(Band.FALLBACK, "reference")

    @classmethod
    def build(cls, request: ExpertsRequest) -> TorchExperts:
        """Return the backend for one block."""
        return cls(request.activation)

    def apply(
        self,
        x_TE: torch.Tensor,
        gate_up_XGE: torch.Tensor,
        down_XEF: torch.Tensor,
        weights_TS: torch.Tensor,
        experts_TS: torch.Tensor,
    ) -> torch.Tensor:
        """See ExpertsBackend."""
        import torch

        from jackfield.layers.activation import gated_op
        from jackfield.layers.functional import REFERENCES

        activation = REFERENCES[gated_op(self._activation)]
        flat = experts_TS.flatten()
        order = flat.argsort(stable=True)
        tokens = order // experts_TS.shape[1]
        counts = torch.bincount(flat, minlength=len(gate_up_XGE)).tolist()
        gathered = x_TE[tokens]
        parts = []
        for expert, rows in enumerate(torch.split(gathered, counts)):
            if len(rows):
                parts.append(activation(rows @ gate_up_XGE[expert].T) @ down_XEF[expert].T)
        out_TE = torch.zeros_like(x_TE)
        if parts:
            weighted = torch.cat(parts) * weights_TS.flatten()[order].unsqueeze(-1)
            out_TE.index_add_(0, tokens, weighted)
        return out_TE
