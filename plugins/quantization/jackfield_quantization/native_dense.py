"""Dense weights, multiplied by kernels in C where there are few rows, on CPUs."""

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
from jackfield_native.toolchain import unavailable
from jackfield_quantization.unquantized import no_online_conversion


class NativeDense(QuantizationMethod):
    """Checkpoints that are not quantized. Weights that the checkpoint stores in 16 bits stay so when the computation
    is in float32: they are widened as they are read, which is exact.
    """

    name: ClassVar[str] = "native_dense"
    summary: ClassVar[str] = "dense weights; kernels in C where there are few rows"
    kinds: ClassVar[frozenset[str]] = frozenset({""})
    features: ClassVar[frozenset[str]] = frozenset({"linear", "embedding", "head", "experts", "batch_invariant"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "bfloat16"})
    device_types: ClassVar[frozenset[str]] = frozenset({"cpu"})

    @classmethod
    def check(cls, request: QuantizationRequest) -> Sequence[Reason]:
        """Reject conversion at load, and machines that cannot build the kernels."""
        reason = unavailable()
        return [*no_online_conversion(cls.name, request), *([reason] if reason else [])]

    @classmethod
    def preference(cls, request: QuantizationRequest) -> Preference:
        """Return GOOD."""
        return Preference(Band.GOOD, "products of few rows read the weight once")

    @classmethod
    def scheme(cls, info: LayerInfo, spec: Any) -> LinearScheme:
        """Return the scheme of a layer; experts are left to the experts backend."""
        from jackfield_quantization.native_schemes import NativeDenseScheme
        from jackfield_quantization.unquantized_scheme import DenseScheme

        return DenseScheme() if info.num_experts else NativeDenseScheme()
