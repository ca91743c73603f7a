"""GGUF checkpoints: every GGML type that the gguf package can dequantize."""

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

PREFIX = "ggml:"
"""What the dtype words of GGUF tensors begin with."""

PLAIN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""GGML's and torch's words of types that are not packed."""

_LEGACY = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"})
_K_QUANTS = frozenset({"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"})
_TERNARY_AND_FP4 = frozenset({"TQ1_0", "TQ2_0", "MXFP4", "NVFP4"})
_I_QUANTS = frozenset(
    {"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS"},
)
PACKED_TYPES = _LEGACY | _K_QUANTS | _TERNARY_AND_FP4 | _I_QUANTS
"""Packed types that can be read; a test compares them with the gguf package."""

NOT_WEIGHTS = frozenset({"I8", "I16", "I32", "I64", "F64"})
"""Types of side tensors, which no linear layer holds."""


class Gguf(QuantizationMethod):
    """GGUF weights, dequantized when they are loaded."""

    name: ClassVar[str] = "gguf"
    summary: ClassVar[str] = "all GGML types, dequantized at load"
    kinds: ClassVar[frozenset[str]] = frozenset({"gguf"})
    features: ClassVar[frozenset[str]] = frozenset({"linear", "embedding", "head", "experts"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "bfloat16", "float16"})
    requires: ClassVar[tuple[str, ...]] = ("gguf>=0.17",)

    @classmethod
    def check(cls, request: QuantizationRequest) -> Sequence[Reason]:
        """Return the storage types that cannot be read, and whether another format is asked for."""
        words = {word.removeprefix(PREFIX) for word in request.storage_dtypes if word.startswith(PREFIX)}
        unknown = sorted(words - PACKED_TYPES - PLAIN_TYPES.keys() - NOT_WEIGHTS)
        reasons = no_online_conversion(cls.name, request)
        if unknown:
            detail = f"{', '.join(unknown)} cannot be dequantized"
            reasons.append(Reason("storage_dtype", "storage_dtypes", detail, "use a file in another quantization"))
        return reasons

    @classmethod
    def preference(cls, request: QuantizationRequest) -> Preference:
        """Return FALLBACK: right, but as large in memory as a dense checkpoint."""
        return Preference(Band.FALLBACK, "weights are dequantized at load")

    @classmethod
    def scheme(cls, info: LayerInfo, spec: Any) -> LinearScheme:
        """Return the scheme of any layer."""
        from jackfield_quantization.gguf_scheme import GgufScheme

        return GgufScheme()
