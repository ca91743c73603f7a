"""``gluon_dense``: as ``triton_dense``, and gates, their activation and what it is multiplied with are one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jackfield.interfaces import LayerInfo, LinearScheme, Preference, QuantizationRequest, Reason
from jackfield_quantization.triton_dense import TritonDense
from jackfield_triton.rows_product import other_device


class GluonDense(TritonDense):
    """Checkpoints that are not quantized; for many rows, what a gated activation takes is never written."""

    name: ClassVar[str] = "gluon_dense"
    summary: ClassVar[str] = "as triton_dense; gated products of many rows in one kernel, capability 9.0"
    requires: ClassVar[tuple[str, ...]] = ("triton>=3.6",)
    opt_in: ClassVar[bool] = True

    @classmethod
    def check(cls, request: QuantizationRequest) -> Sequence[Reason]:
        """Reject conversion at load, and devices with other matrix instructions."""
        return [*super().check(request), *other_device(request.device)]

    @classmethod
    def preference(cls, request: QuantizationRequest) -> Preference:
        """Return GOOD."""
        return Preference(super().preference(request).band, "skinny products for few rows, gated ones for many")

    @classmethod
    def scheme(cls, info: LayerInfo, spec: Any) -> LinearScheme:
        """Return a scheme of its own for every layer; experts are left to what multiplies them."""
        from jackfield_quantization.gluon_dense_scheme import GatedScheme

        return super().scheme(info, spec) if info.num_experts else GatedScheme(cls.pdl)
