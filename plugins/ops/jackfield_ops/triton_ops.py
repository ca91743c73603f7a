"""The Triton set of layer ops: one kernel per op. Shared by every platform that Triton compiles for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from jackfield.interfaces import (
    OPS,
    QUANTIZING_OPS,
    ROUTING_OPS,
    SAMPLING_OPS,
    STEP_OPS,
    Band,
    OpRequest,
    OpsProvider,
    Option,
    Preference,
    Reason,
    Settings,
)
from jackfield_triton.launch import capability_reasons


class TritonOps(OpsProvider):
    """Fused kernels for every published op; computation in float32, rounding as in the torch references."""

    name = "triton"
    summary = "fused Triton kernels for all ops"
    kinds: ClassVar[frozenset[str]] = frozenset({*OPS, *QUANTIZING_OPS, *SAMPLING_OPS, *ROUTING_OPS, *STEP_OPS})
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "bfloat16", "float16"})
    device_types: ClassVar[frozenset[str]] = frozenset({"cuda"})
    requires: ClassVar[tuple[str, ...]] = ("triton>=3.2",)
    options: ClassVar[Mapping[str, Option]] = {
        "pdl": Option(bool, True, "start kernels while the ones before them drain, from capability 9.0 on"),
    }

    @classmethod
    def check(cls, request: OpRequest) -> Sequence[Reason]:
        """Reject devices below capability 8.0."""
        return capability_reasons(request.device)

    @classmethod
    def preference(cls, request: OpRequest) -> Preference:
        """Return GOOD."""
        return Preference(Band.GOOD, "fused Triton kernels")

    @classmethod
    def build(cls, op: str, request: OpRequest, settings: Settings) -> Callable[..., Any]:
        """Return the launcher of ``op``."""
        from jackfield_triton.launch import pdl_of

        if op in SAMPLING_OPS:
            from jackfield_ops.triton_draw import draw_tokens

            return draw_tokens
        from jackfield_ops.triton_launch import LAUNCHERS
        from jackfield_ops.triton_route import route_experts
        from jackfield_ops.triton_step import LAUNCHERS as AROUND

        capability = (0, 0) if request.device is None else request.device.capability
        launcher = {**LAUNCHERS, **AROUND, "route_experts": route_experts}[op]
        return partial(launcher, pdl=pdl_of(capability, settings.values.get("pdl", True)))
