"""``triton``: fused grouped products over blocks of rows that share an expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import (
    Band,
    DeviceFacts,
    ExpertsBackend,
    ExpertsRequest,
    Preference,
    Reason,
)
from jackfield.interfaces.moe import FEATURES, LAYOUTS, ExpertMatrices, Tuned, tuned_folder
from jackfield_moe.limits import shared_limits, unknown_activation

if TYPE_CHECKING:
    import torch

MIN_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)
ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(
        ("gelu_pytorch_tanh", "gelu_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_tanh"
    ),
    "relu2": "relu2",
    "relu": "relu",
    "swiglu_oai": "swiglu_oai",
    "swiglu_step": "swiglu_step",
    "situ": "situ",
}
"""HF's names of activations, and the kernels' words for them."""
MOST_EXPERTS = 4096
"""One program of the sorting kernel holds a number for each expert."""


class TritonExperts(ExpertsBackend):
    """Rows are sorted into blocks of one expert; gate, up and activation are a kernel, down and weights another."""

    name = "triton"
    summary = "fused grouped products in Triton"
    kinds: ClassVar[frozenset[str]] = LAYOUTS
    features: ClassVar[frozenset[str]] = FEATURES
    dtypes: ClassVar[frozenset[str]] = frozenset({"bfloat16", "float16", "float32"})
    device_types: ClassVar[frozenset[str]] = frozenset({"cuda"})
    requires: ClassVar[tuple[str, ...]] = ("triton>=3.2",)

    def __init__(self, request: ExpertsRequest, device: str = "", capability: tuple[int, int] = (0, 0)) -> None:
        from jackfield_moe.triton_plan import has_copy_engine, plan_for
        from jackfield_triton.launch import pdl_of

        self._request = request
        self._activation = ACTIVATIONS[request.activation]
        self._plan = plan_for(request, device, (tuned_folder(),), hopper=has_copy_engine(capability))
        self._pdl = pdl_of(capability)

    @classmethod
    def check(cls, request: ExpertsRequest) -> Sequence[Reason]:
        """Reject old devices, activations without a kernel, and sizes that layouts cannot have."""
        return tuple(_limits(request))

    @classmethod
    def preference(cls, request: ExpertsRequest) -> Preference:
        """Return GOOD."""
        return Preference(Band.GOOD, "fused kernels over blocks of rows")

    @classmethod
    def build(cls, request: ExpertsRequest) -> TritonExperts:
        """Return the backend for one block."""
        return cls(request, device_name(), device_capability())

    def apply(
        self,
        x_NE: torch.Tensor,
        up: ExpertMatrices,
        down: ExpertMatrices,
        weights_NS: torch.Tensor,
        experts_NS: torch.Tensor,
    ) -> torch.Tensor:
        """See ExpertsBackend."""
        from jackfield_moe.triton_launch import few_experts, given_rows, run_experts
        from jackfield_moe.triton_plan import FEW_ROWS, few_launch

        if not len(x_NE):
            return x_NE.new_empty(x_NE.shape)
        rows = x_NE if x_NE.stride(-1) == 1 else x_NE.contiguous()
        if len(rows) <= FEW_ROWS:
            routed = (weights_NS, experts_NS)
            launch = few_launch(len(rows), up.layout)
            return few_experts(self._request, launch, rows, up, down, *routed, self._activation, pdl=self._pdl)
        launches = self._plan.of(len(rows))
        given = given_rows(rows, up, down)
        return run_experts(
            self._request,
            launches,
            given,
            up,
            down,
            weights_NS,
            experts_NS,
            rows.dtype,
            self._activation,
            pdl=self._pdl,
        )

    def kernel_rows(self) -> Sequence[int]:
        """See ExpertsBackend."""
        from jackfield_moe.triton_launch import MOST_CHUNKS, NARROW_ROWS, SCANS
        from jackfield_moe.triton_plan import FEW_ROWS

        pairs = (0, *SCANS, MOST_CHUNKS * SCANS[-1])
        sorts = (count // max(1, self._request.top_k) + 1 for count in pairs)
        return 1, 2, *(max(rows, FEW_ROWS + 1) for rows in (*self._plan.starts, NARROW_ROWS, *sorts))

    @classmethod
    def tune(cls, request: ExpertsRequest, progress: Callable[[str], None]) -> Tuned | None:
        """See ExpertsBackend."""
        from jackfield_moe.triton_plan import has_copy_engine
        from jackfield_moe.triton_tune import tune

        return tune(request, device_name(), progress, copy_engine=has_copy_engine(device_capability()))


def _limits(request: ExpertsRequest) -> Iterator[Reason]:
    least = FP8_CAPABILITY if request.kind == "fp8" else MIN_CAPABILITY
    device = request.device or DeviceFacts("cuda", capability=least)
    if device.capability < least:
        found, wanted = (".".join(map(str, pair)) for pair in (device.capability, least))
        yield Reason("capability", "device.capability", f"{found} is below {wanted}")
    yield from unknown_activation(request, frozenset(ACTIVATIONS))
    yield from shared_limits(request)
    if request.num_experts > MOST_EXPERTS:
        yield Reason("num_experts", "num_experts", f"{request.num_experts} is more than {MOST_EXPERTS}")


def device_name() -> str:
    """Return what the vendor calls the device of this process, or ``""`` where there is none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def device_capability() -> tuple[int, int]:
    """Return the compute capability of the device of this process, or (0, 0) where there is none."""
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
