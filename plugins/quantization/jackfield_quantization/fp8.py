"""``fp8``: converts dense weights to 8-bit floats when they are loaded."""

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

MIN_CAPABILITY = (8, 9)
"""The oldest CUDA devices that multiply 8-bit floats."""
ALIGNMENT = 16
"""Matrix units take rows and columns in steps of this."""


class Fp8(QuantizationMethod):
    """float8_e4m3fn weights with a scale for each output, activations quantized token by token where there are many.

    Embedding and output projection stay as they are. Experts get a scale for each output too; whether activations are
    quantized is their backend's choice.
    """

    name: ClassVar[str] = "fp8"
    summary: ClassVar[str] = "dense weights, converted to float8_e4m3fn at load"
    kinds: ClassVar[frozenset[str]] = frozenset({""})
    features: ClassVar[frozenset[str]] = frozenset({"linear", "embedding", "head", "experts", "quantized_activations"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"bfloat16", "float16", "float32"})
    opt_in: ClassVar[bool] = True

    @classmethod
    def check(cls, request: QuantizationRequest) -> Sequence[Reason]:
        """Reject CUDA devices without 8-bit floats; elsewhere weights are expanded before each product."""
        device = request.device
        if device is None or device.type != "cuda" or device.capability >= MIN_CAPABILITY:
            return ()
        found = ".".join(map(str, device.capability))
        return (Reason("capability", "device.capability", f"{found} is below 8.9"),)

    @classmethod
    def preference(cls, request: QuantizationRequest) -> Preference:
        """Return FALLBACK where nothing multiplies 8-bit floats, else GOOD."""
        if request.device is not None and request.device.type == "cuda":
            return Preference(Band.GOOD, "8-bit matrix units")
        return Preference(Band.FALLBACK, "saves memory, but expands weights before each product")

    @classmethod
    def scheme(cls, info: LayerInfo, spec: Any) -> LinearScheme | None:
        """Return a scheme for experts, and for linear layers of sizes that matrix units take; None for all else."""
        if info.role == "experts":
            from jackfield_quantization.fp8_experts import Fp8ExpertScheme

            return Fp8ExpertScheme()
        sizes = (info.local_input_size, sum(info.local_output_sizes))
        if info.role != "linear" or any(size % ALIGNMENT for size in sizes):
            return None
        from jackfield_quantization.fp8_scheme import Fp8Scheme

        return Fp8Scheme()

    @classmethod
    def experts_layout(cls, spec: Any) -> str:
        """Return the layout of converted experts."""
        return "fp8"
