"""The layer ops in C, for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from jackfield.interfaces import OPS, Band, OpRequest, OpsProvider, Preference, Reason, Settings
from jackfield_native.toolchain import unavailable


class NativeOps(OpsProvider):
    """One call for each op, in float32."""

    name = "native"
    summary = "all ops in C, one call each"
    kinds: ClassVar[frozenset[str]] = frozenset(OPS)
    features: ClassVar[frozenset[str]] = frozenset({"batch_invariant"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32"})
    device_types: ClassVar[frozenset[str]] = frozenset({"cpu"})

    @classmethod
    def check(cls, request: OpRequest) -> Sequence[Reason]:
        """Reject machines that cannot build the kernels."""
        reason = unavailable()
        return () if reason is None else (reason,)

    @classmethod
    def preference(cls, request: OpRequest) -> Preference:
        """Return GOOD."""
        return Preference(Band.GOOD, "one call for an op, where torch takes several passes")

    @classmethod
    def build(cls, op: str, request: OpRequest, settings: Settings) -> Callable[..., Any]:
        """Return the function of ``op``."""
        from jackfield_native.library import kernels
        from jackfield_ops.native_calls import CALLS

        kernels()
        return CALLS[op]
