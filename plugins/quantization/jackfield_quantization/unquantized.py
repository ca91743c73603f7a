"""Weights as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jackfield.interfaces import (
    LayerInfo,
    LinearScheme,
    Preference,
    QuantizationMethod,
    QuantizationRequest,
    Reason,
)


class Unquantized(QuantizationMethod):
    """Checkpoints that are not quantized: one dense weight per layer, in the computation type."""

    name: ClassVar[str] = "unquantized"
    summary: ClassVar[str] = "dense weights in the computation type"
    kinds: ClassVar[frozenset[str]] = frozenset({""})
    features: ClassVar[frozenset[str]] = frozenset({"linear", "embedding", "head", "experts"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "bfloat16", "float16", "float64"})

    @classmethod
    def check(cls, request: QuantizationRequest) -> Sequence[Reason]:
        """Return why the weights cannot stay as they are."""
        return no_online_conversion(cls.name, request)

    @classmethod
    def preference(cls, request: QuantizationRequest) -> Preference:
        """Return the plain preference: torch's matrix product."""
        return Preference(why="torch's matrix product on dense weights")

    @classmethod
    def scheme(cls, info: LayerInfo, spec: Any) -> LinearScheme:
        """Return the scheme of any layer."""
        from jackfield_quantization.unquantized_scheme import DenseScheme

        return DenseScheme()


def no_online_conversion(name: str, request: QuantizationRequest) -> list[Reason]:
    """Return the reason of methods that keep the checkpoint's format, where another one is asked for."""
    if not request.online:
        return []
    return [Reason("online", "online", f"{name} does not convert weights to '{request.online}'")]
