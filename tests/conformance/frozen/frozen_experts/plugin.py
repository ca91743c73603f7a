"""The light half: which blocks of experts the kernels take. Nothing here imports torch."""

from collections.abc import Sequence
from typing import Any

from jackfield.interfaces import Band, ExpertsBackend, ExpertsRequest, Preference, Reason


class FrozenExperts(ExpertsBackend):
    """Gated experts with SiLU and dense matrices."""

    name = "frozen_experts"
    api = (1, 0)
    summary = "Frozen experts: one product for each expert that has rows"
    kinds = frozenset({"dense"})
    dtypes = frozenset({"float32", "bfloat16", "float16"})

    @classmethod
    def check(cls, request: ExpertsRequest) -> Sequence[Reason]:
        if request.activation == "silu" and request.gated:
            return []
        return [Reason("activation", "activation", f"'{request.activation}' is not gated silu")]

    @classmethod
    def preference(cls, request: ExpertsRequest) -> Preference:
        return Preference(Band.FALLBACK, "a start, not tuned for any device")

    @classmethod
    def build(cls, request: ExpertsRequest) -> Any:
        from frozen_experts.kernels import Experts

        return Experts()
