"""``triton_dense``: dense weights, with Triton kernels for the products of few rows that decoding consists of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jackfield.interfaces import (
    Band,
    LayerInfo,
    LinearScheme,
    Preference,
    QuantizationMethod,
    QuantizationRequest,
    Reason,
)
from jackfield_quantization.unquantized import no_online_conversion
from jackfield_triton.launch import capability_reasons


class TritonDense(QuantizationMethod):
    """Checkpoints that are not quantized; stored as ``unquantized`` stores them, multiplied faster for few rows."""

    name: ClassVar[str] = "triton_dense"
    summary: ClassVar[str] = "dense weights; Triton kernels where there are few rows"
    kinds: ClassVar[frozenset[str]] = frozenset({""})
    features: ClassVar[frozenset[str]] = frozenset({"linear", "embedding", "head", "experts"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"bfloat16", "float16"})
    device_types: ClassVar[frozenset[str]] = frozenset({"cuda"})
    requires: ClassVar[tuple[str, ...]] = ("triton>=3.2",)
    pdl: ClassVar[bool] = True
    """Whether kernels may start while the ones before them drain. Methods are given no options, so a subclass under
    another name turns it off.
    """

    @classmethod
    def check(cls, request: QuantizationRequest) -> Sequence[Reason]:
        """Reject conversion at load and devices below capability 8.0."""
        return [*no_online_conversion(cls.name, request), *capability_reasons(request.device)]

    @classmethod
    def preference(cls, request: QuantizationRequest) -> Preference:
        """Return GOOD."""
        return Preference(Band.GOOD, "skinny products for few rows")

    @classmethod
    def scheme(cls, info: LayerInfo, spec: Any) -> LinearScheme:
        """Return a scheme of its own for every layer; experts are left to torch's product."""
        from jackfield_quantization.triton_dense_scheme import SkinnyScheme
        from jackfield_quantization.unquantized_scheme import DenseScheme

        return DenseScheme() if info.num_experts else SkinnyScheme(cls.pdl)
