"""The torch references as a provider: right everywhere, fast nowhere in particular."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from jackfield.interfaces import (
    OPS,
    QUANTIZING_OPS,
    ROUTING_OPS,
    SAMPLING_OPS,
    STEP_OPS,
    Band,
    OpRequest,
    OpsProvider,
    Preference,
    Settings,
)


class TorchOps(OpsProvider):
    """Plain torch for every published op, on any device."""

    name = "torch"
    summary = "torch references of all ops"
    kinds: ClassVar[frozenset[str]] = frozenset({*OPS, *QUANTIZING_OPS, *SAMPLING_OPS, *ROUTING_OPS, *STEP_OPS})

    @classmethod
    def preference(cls, request: OpRequest) -> Preference:
        """Return FALLBACK: any fused kernel is ahead."""
        return Preference(Band.FALLBACK, "reference")

    @classmethod
    def build(cls, op: str, request: OpRequest, settings: Settings) -> Callable[..., Any]:
        """Return the reference of ``op``."""
        from jackfield.layers.functional import REFERENCES

        return REFERENCES[op]
