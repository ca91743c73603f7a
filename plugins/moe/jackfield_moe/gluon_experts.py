"""``gluon``: as ``triton``, but for steps in which experts have many rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import Band, ExpertsRequest, Preference, Reason
from jackfield.interfaces.moe import ExpertMatrices
from jackfield_moe.triton_experts import ACTIVATIONS as WORDS
from jackfield_moe.triton_experts import TritonExperts
from jackfield_triton.rows_product import ACTIVATIONS, ALIGNMENT, DEPTH, has_wide_groups, other_device

if TYPE_CHECKING:
    import torch

MANY_PAIRS = 192
"""From so many pairs of an expert on: below, reading weights takes longer than multiplying."""


class GluonExperts(TritonExperts):
    """Gate, up and activation are a kernel that stays on its multiprocessor, and so are down and weights."""

    name = "gluon"
    summary = "as triton; products of many rows by groups of warps with tasks of their own, capability 9.0"
    kinds: ClassVar[frozenset[str]] = frozenset({"dense"})
    features: ClassVar[frozenset[str]] = frozenset({"partial"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"bfloat16", "float16"})
    requires: ClassVar[tuple[str, ...]] = ("triton>=3.6",)
    opt_in: ClassVar[bool] = True

    def __init__(self, request: ExpertsRequest, device: str = "", capability: tuple[int, int] = (0, 0)) -> None:
        super().__init__(request, device, capability)
        self._cores = device_cores() if has_wide_groups(capability) else 0

    @classmethod
    def check(cls, request: ExpertsRequest) -> Sequence[Reason]:
        """Reject other devices, and activations and sizes that the kernels do not have."""
        return *super().check(request), *_limits(request)

    @classmethod
    def preference(cls, request: ExpertsRequest) -> Preference:
        """Return GOOD."""
        return Preference(Band.GOOD, "matrix units that never wait for rows or weights")

    @property
    def _many(self) -> int:
        """Rows of a step from which on an expert has many."""
        return -(-MANY_PAIRS * self._request.num_experts // max(1, self._request.top_k))

    def apply(
        self,
        x_NE: torch.Tensor,
        up: ExpertMatrices,
        down: ExpertMatrices,
        weights_NS: torch.Tensor,
        experts_NS: torch.Tensor,
    ) -> torch.Tensor:
        """See ExpertsBackend."""
        from jackfield_moe.triton_launch import many_experts

        if len(x_NE) < self._many or not self._cores:
            return super().apply(x_NE, up, down, weights_NS, experts_NS)
        routed = (weights_NS, experts_NS)
        return many_experts(self._request, self._cores, x_NE, up, down, *routed, self._activation, pdl=self._pdl)

    def kernel_rows(self) -> Sequence[int]:
        """See ExpertsBackend."""
        return *super().kernel_rows(), self._many


def _limits(request: ExpertsRequest) -> Iterator[Reason]:
    yield from other_device(request.device)
    word = WORDS.get(request.activation)
    if word is not None and word not in ACTIVATIONS:
        yield Reason("activation", "activation", f"'{request.activation}' has no kernel for many rows")
    for name, unit in (("hidden_size", DEPTH), ("intermediate_size", ALIGNMENT)):
        size = getattr(request, name)
        if size % unit:
            yield Reason(name, name, f"{size} is no multiple of {unit}")


def device_cores() -> int:
    """Return the multiprocessors of the device of this process."""
    import torch

    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
