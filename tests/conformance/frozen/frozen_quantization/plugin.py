"""The light half: which checkpoints the method reads. Nothing here imports torch."""

from typing import Any

from jackfield.interfaces import Band, LayerInfo, LinearScheme, Preference, QuantizationMethod, QuantizationRequest


class FrozenQuantization(QuantizationMethod):
    """Checkpoints with ``"quant_method": "frozen_quantization"``: integers of 8 bits with a scale for each output."""

    name = "frozen_quantization"
    api = (1, 0)
    summary = "Frozen quantization: 8-bit integers, a scale for each output"
    kinds = frozenset({"frozen_quantization"})
    features = frozenset({"linear", "embedding", "head"})
    dtypes = frozenset({"float32", "bfloat16", "float16"})

    @classmethod
    def preference(cls, request: QuantizationRequest) -> Preference:
        return Preference(Band.SUPPORTED, "weights are expanded before each product")

    @classmethod
    def scheme(cls, info: LayerInfo, spec: Any) -> LinearScheme | None:
        # Embeddings, heads and experts stay as they are.
        if info.role != "linear":
            return None
        from frozen_quantization.scheme import Int8Scheme

        return Int8Scheme()
