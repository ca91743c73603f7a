"""``torch_grouped``: torch's grouped product on devices that have a kernel for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import Band, ExpertsRequest, Preference, Reason
from jackfield.interfaces.moe import ExpertMatrices
from jackfield_moe.torch_experts import ALIGNMENT, TorchExperts

if TYPE_CHECKING:
    import torch

MIN_CAPABILITY = (9, 0)
BYTES = 2
"""Of a bfloat16 number."""


class TorchGrouped(TorchExperts):
    """Rows sorted by expert, then ``torch.nn.functional.grouped_mm``. The host never waits for the device."""

    name = "torch_grouped"
    summary = "torch's grouped product, bfloat16 on capability 9.0 and later"
    kinds: ClassVar[frozenset[str]] = frozenset({"dense"})
    # Leaving pairs out would make the host wait.
    features: ClassVar[frozenset[str]] = frozenset({"bias", "ungated"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"bfloat16"})
    device_types: ClassVar[frozenset[str]] = frozenset({"cuda"})

    @classmethod
    def check(cls, request: ExpertsRequest) -> Sequence[Reason]:
        """Reject devices without the kernel, and rows that are not whole 16-byte words."""
        found = list(super().check(request))
        device = request.device
        if device is not None and device.capability < MIN_CAPABILITY:
            capability = ".".join(map(str, device.capability))
            found.append(Reason("capability", "device.capability", f"{capability} is below 9.0"))
        for name in ("hidden_size", "intermediate_size"):
            size = getattr(request, name)
            if size * BYTES % ALIGNMENT:
                found.append(Reason(name, name, f"{size} is no multiple of {ALIGNMENT // BYTES}"))
        return found

    @classmethod
    def preference(cls, request: ExpertsRequest) -> Preference:
        """Return SUPPORTED: sorting, activation and weights are kernels of their own."""
        return Preference(Band.SUPPORTED, "torch's grouped product")

    @classmethod
    def build(cls, request: ExpertsRequest) -> TorchGrouped:
        """Return the backend for one block."""
        return cls(request)

    def takes_grouped(self, x_PI: torch.Tensor, matrices: ExpertMatrices) -> bool:
        """Return True where there are rows: everything else was checked."""
        return len(x_PI) > 0
