"""``fp8``: converts dense weights to 8-bit floats when they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jackfield.interfaces import (
    Band,
    LayerInfo,
    LinearScheme,
    Preference,
    QuantizationRequest,
    Reason,
)
from jackfield_quantization.online import OnlineMethod

MIN_CAPABILITY = (8, 9)
"""The oldest CUDA devices that multiply 8-bit floats."""
ALIGNMENT = 16
"""Matrix units take rows and columns in steps of this."""


class Fp8(OnlineMethod):
    """float8_e4m3fn weights with a scale for each output, activations quantized token by token where there are many.

    Embedding and output projection stay as they are. Experts get a scale for each output too; whether activations are
    quantized is their backend's choice.
    """

    name: ClassVar[str] = "fp8"
    summary: ClassVar[str] = "dense weights, converted to float8_e4m3fn at load"
    features: ClassVar[frozenset[str]] = frozenset({"linear", "embedding", "head", "experts", "quantized_activations"})

    @classmethod
    def check(cls, request: QuantizationRequest) -> Sequence[Reason]:
        """Reject CUDA devices without 8-bit floats; elsewhere weights are expanded before each product."""
        return lacks_matrix_units(request)

    @classmethod
    def preference(cls, request: QuantizationRequest) -> Preference:
        """Return FALLBACK where nothing multiplies 8-bit floats, else GOOD."""
        if request.device is not None and request.device.type == "cuda":
            return Preference(Band.GOOD, "8-bit matrix units")
        return Preference(Band.FALLBACK, "saves memory, but expands weights before each product")

    @classmethod
    def converted(cls, info: LayerInfo) -> LinearScheme | None:
        """Return a scheme for experts, and for linear layers of sizes that matrix units take; None for all else."""
        if info.role == "experts":
            from jackfield_quantization.fp8_experts import Fp8ExpertScheme

            return Fp8ExpertScheme()
        if not fits_matrix_units(info):
            return None
        from jackfield_quantization.fp8_scheme import Fp8Scheme

        return Fp8Scheme()

    @classmethod
    def experts_layout(cls, spec: Any) -> str:
        """Return the layout of converted experts."""
        return "fp8"


def lacks_matrix_units(request: QuantizationRequest) -> list[Reason]:
    """Return the reason why a CUDA device does not multiply 8-bit floats; other devices are asked nothing."""
    device = request.device
    if device is None or device.type != "cuda" or device.capability >= MIN_CAPABILITY:
        return []
    found = ".".join(map(str, device.capability))
    return [Reason("capability", "device.capability", f"{found} is below 8.9")]


def fits_matrix_units(info: LayerInfo) -> bool:
    """Return whether a layer multiplies, and is of sizes that matrix units take."""
    sizes = (info.local_input_size, sum(info.local_output_sizes))
    return info.role == "linear" and not any(size % ALIGNMENT for size in sizes)
