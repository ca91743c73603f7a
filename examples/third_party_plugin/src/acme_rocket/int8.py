"""The light half: which checkpoints the method reads. Nothing here imports torch."""

from typing import Any

from jackfield.interfaces import Band, LayerInfo, LinearScheme, Preference, QuantizationMethod, QuantizationRequest


class RocketInt8(QuantizationMethod):
    """Checkpoints with ``"quant_method": "rocket_int8"``: integers of 8 bits with a scale for each output."""

    name = "rocket_int8"
    summary = "an example: 8-bit integers, a scale for each output"
    kinds = frozenset({"rocket_int8"})
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
        from acme_rocket.int8_scheme import Int8Scheme

        return Int8Scheme()
