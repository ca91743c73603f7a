"""The light half: which ops the provider has. Nothing here imports torch."""

from collections.abc import Callable
from typing import Any

from jackfield.interfaces import Band, OpRequest, OpsProvider, Preference, Settings


class FrozenOps(OpsProvider):
    """The root-mean-square norm; all other ops are somebody else's."""

    name = "frozen_ops"
    api = (1, 0)
    summary = "Frozen ops: rms_norm"
    kinds = frozenset({"rms_norm"})

    @classmethod
    def preference(cls, request: OpRequest) -> Preference:
        return Preference(Band.FALLBACK, "a start, not tuned for any device")

    @classmethod
    def build(cls, op: str, request: OpRequest, settings: Settings) -> Callable[..., Any]:
        from frozen_ops.functions import rms_norm

        return {"rms_norm": rms_norm}[op]
