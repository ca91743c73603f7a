"""The method that writes GGUF files of dense models. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from jackfield.interfaces import (
    Band,
    LayerInfo,
    LinearScheme,
    ModelExporter,
    Option,
    Preference,
    QuantizationMethod,
    QuantizationRequest,
    Settings,
)

TYPES = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "f16", "bf16", "f32")
"""GGML types, in small letters, that matrices can be written in: those that the gguf package quantizes to."""


class GgufFile(QuantizationMethod):
    """Writes a dense model as one GGUF file: configuration, tokenizer and all tensors."""

    name: ClassVar[str] = "gguf_file"
    summary: ClassVar[str] = "writes GGUF files of dense models: jackfield quantize --format gguf"
    kinds: ClassVar[frozenset[str]] = frozenset({""})
    features: ClassVar[frozenset[str]] = frozenset({"linear", "embedding", "head", "experts"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "bfloat16", "float16"})
    requires: ClassVar[tuple[str, ...]] = ("gguf>=0.19",)
    api: ClassVar[tuple[int, int]] = (1, 7)
    opt_in: ClassVar[bool] = True
    writes: ClassVar[str] = "gguf"
    options: ClassVar[Mapping[str, Option]] = {"type": Option(str, TYPES[0], "GGML type of matrices", TYPES)}

    @classmethod
    def configure(cls, spec: Any, settings: Settings) -> str:
        """Return the type."""
        return str(settings.values.get("type") or TYPES[0])

    @classmethod
    def preference(cls, request: QuantizationRequest) -> Preference:
        """Return FALLBACK: nothing is run with it."""
        return Preference(Band.FALLBACK, "writes files and runs none")

    @classmethod
    def scheme(cls, info: LayerInfo, spec: Any) -> LinearScheme | None:
        """Return a scheme that refuses to run, or None for what no file would differ in."""
        if info.role != "linear":
            return None
        from jackfield_quantization.rounding import UnwrittenScheme

        return UnwrittenScheme(cls.name, cls.writes)

    @classmethod
    def model_exporter(cls, spec: Any) -> ModelExporter | None:
        """Return what writes GGUF files."""
        from jackfield_quantization.gguf_export import GgufExporter

        return GgufExporter(spec)
