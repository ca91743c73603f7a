"""The reference experts backend: rows sorted by expert, one grouped product per matrix. Legend: N rows, S chosen, P
pairs of row and expert, X experts, E width, F inner, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import Band, ExpertsBackend, ExpertsRequest, Preference, Reason
from jackfield.interfaces.moe import FEATURES, LAYOUTS, ExpertMatrices
from jackfield_moe.limits import shared_limits

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16
"""Bytes that rows of inputs must be multiples of for torch's grouped product."""


class TorchExperts(ExpertsBackend):
    """Plain torch, any device, any published layout. Never a loop over rows; over experts only where torch has no
    grouped product for the matrices.
    """

    name = "torch"
    summary = "torch reference of routed experts"
    kinds: ClassVar[frozenset[str]] = LAYOUTS
    features: ClassVar[frozenset[str]] = FEATURES

    def __init__(self, request: ExpertsRequest) -> None:
        from jackfield_moe.activations import activation_of

        self._activation = activation_of(request)
        self._partial = "partial" in request.needs

    @classmethod
    def check(cls, request: ExpertsRequest) -> Sequence[Reason]:
        """Reject what no backend can compute."""
        return tuple(shared_limits(request))

    @classmethod
    def preference(cls, request: ExpertsRequest) -> Preference:
        """Return SUPPORTED for plain matrices on a CPU, where torch's grouped product is tuned, else FALLBACK."""
        if request.device is not None and request.device.type == "cpu" and request.kind == "dense":
            return Preference(Band.SUPPORTED, "torch's grouped product")
        return Preference(Band.FALLBACK, "reference")

    @classmethod
    def build(cls, request: ExpertsRequest) -> TorchExperts:
        """Return the backend for one block."""
        return cls(request)

    def apply(
        self,
        x_NE: torch.Tensor,
        up: ExpertMatrices,
        down: ExpertMatrices,
        weights_NS: torch.Tensor,
        experts_NS: torch.Tensor,
    ) -> torch.Tensor:
        """See ExpertsBackend."""
        import torch

        flat = experts_NS.flatten()
        order = flat.argsort(stable=True)
        expert_P = flat[order]
        if self._partial:
            order, expert_P = order[expert_P >= 0], expert_P[expert_P >= 0]
        row_P = order // experts_NS.shape[1]
        # Not a count of each: that would make the host wait for a device.
        all_X = torch.arange(len(up.weight), device=expert_P.device)
        ends_X = torch.searchsorted(expert_P, all_X, right=True)
        inner_PF = self._activation(self.product(x_NE[row_P], up, expert_P, ends_X))
        out_PE = self.product(inner_PF, down, expert_P, ends_X)
        out_PE = out_PE * weights_NS.flatten()[order].unsqueeze(-1).to(out_PE.dtype)
        return torch.zeros_like(x_NE).index_add_(0, row_P, out_PE)

    def product(
        self, x_PI: torch.Tensor, matrices: ExpertMatrices, expert_P: torch.Tensor, ends_X: torch.Tensor
    ) -> torch.Tensor:
        """Return [P, O]: each row times the matrix of its expert, and its bias.

        Args:
            x_PI: rows, sorted by expert. expert_P: of each. ends_X: where the rows of each expert end.
        """
        if self.takes_grouped(x_PI, matrices):
            from torch.nn.functional import grouped_mm

            out = grouped_mm(x_PI, matrices.weight.transpose(1, 2), offs=ends_X.int())
        else:
            out = _one_by_one(x_PI, matrices, ends_X.tolist())
        return out if matrices.bias is None else out.add_(matrices.bias[expert_P])

    def takes_grouped(self, x_PI: torch.Tensor, matrices: ExpertMatrices) -> bool:
        """Return whether torch has a grouped product for these: aligned rows of plain numbers, on a CPU; elsewhere that
        is a backend of its own.
        """
        aligned = matrices.weight.shape[2] * x_PI.element_size() % ALIGNMENT == 0
        plain = matrices.layout == "dense" and x_PI.device.type == "cpu" and x_PI.element_size() <= 4
        return plain and aligned and len(x_PI) > 0


def _one_by_one(x_PI: torch.Tensor, matrices: ExpertMatrices, ends: list[int]) -> torch.Tensor:
    from jackfield_moe.layouts import matrix_of

    out = x_PI.new_empty((len(x_PI), matrices.weight.shape[1]))
    start = 0
    for expert, end in enumerate(ends):
        if end > start:
            out[start:end] = x_PI[start:end] @ matrix_of(matrices, expert, x_PI.dtype).T
        start = end
    return out
