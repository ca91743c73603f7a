"""ExpertsBackend: the matrix work of a mixture-of-experts block. Group ``jackfield.moe_experts.v1``.

Routing is the core's. The quantization method owns the weights up to a published packed layout; an experts backend
declares the layouts it accepts.
Legend: T tokens, S experts per token, X experts, E width, F intermediate.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jackfield.interfaces.plugin import Plugin, Request

if TYPE_CHECKING:
    import torch

LAYOUTS = frozenset({"dense"})
"""Published expert weight layouts. ``dense``: gate_up [X, 2F, E] and down [X, E, F] in the computation type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsRequest(Request):
    """Asks for expert kernels; ``kind`` is the weight layout.

    Args:
        num_experts: X on this rank. top_k: S. hidden_size: E. intermediate_size: F on this rank. activation: as in
            BuildContext.activation.
    """

    num_experts: int = 0
    top_k: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    activation: str = "silu"


class ExpertsBackend(Plugin):
    """Applies chosen experts to tokens."""

    family: ClassVar[str] = "moe_experts"

    @classmethod
    @abstractmethod
    def build(cls, request: ExpertsRequest) -> Any:
        """Return an object with :meth:`apply`."""

    def apply(
        self,
        x_TE: torch.Tensor,
        gate_up_XGE: torch.Tensor,
        down_XEF: torch.Tensor,
        weights_TS: torch.Tensor,
        experts_TS: torch.Tensor,
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [T, E]."""
        raise NotImplementedError
