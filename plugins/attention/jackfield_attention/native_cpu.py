"""``native_cpu``: paged attention for CPUs; short queries by a kernel in C, long ones by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import (
    AttentionBackend,
    AttentionEnv,
    AttentionRequest,
    Band,
    CacheSpec,
    GraphSupport,
    HostLengths,
    MetadataBuilder,
    Preference,
    Reason,
)
from jackfield_attention.torch_sdpa import TorchSdpaBackend
from jackfield_native.toolchain import unavailable

if TYPE_CHECKING:
    from jackfield_attention.native_cpu_layer import NativeLayer

LARGEST_HEAD = 512


class NativeCpuBackend(AttentionBackend):
    """One call for all short queries of a step, and one for norm, rotation and cache write. The cache is laid out as
    ``torch_sdpa``'s.
    """

    name = "native_cpu"
    summary = "paged attention in C for short queries, torch's for long ones"
    kinds: ClassVar[frozenset[str]] = frozenset({"full", "sliding"})
    features: ClassVar[frozenset[str]] = frozenset(
        TorchSdpaBackend.features - {"alibi", "sinks", "dual_chunk", "cache_scales"} | {"batch_invariant"}
    )
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32"})
    device_types: ClassVar[frozenset[str]] = frozenset({"cpu"})
    graph_support: ClassVar[GraphSupport] = GraphSupport.DECODE
    host_lengths: ClassVar[HostLengths] = HostLengths.NONE
    prepares: ClassVar[bool] = True

    @classmethod
    def check(cls, request: AttentionRequest) -> Sequence[Reason]:
        """Reject what ``torch_sdpa`` rejects, head sizes above 512, and machines that cannot build the kernels."""
        found = list(TorchSdpaBackend.check(request))
        if not found and request.cache_dtype not in ("", request.dtype):
            detail = f"{request.cache_dtype} differs from the computation type {request.dtype}"
            found.append(Reason("cache_dtype", "cache_dtype", detail, "leave cache.cache_dtype out"))
        if {"tree", "batch_invariant"} <= request.needs:
            found.append(Reason("tree", "needs", "drafts that branch are torch's, whose results depend on the batch"))
        for fact in ("head_size", "value_head_size"):
            if getattr(request, fact) > LARGEST_HEAD:
                found.append(Reason(fact, fact, f"{getattr(request, fact)} is above {LARGEST_HEAD}"))
        reason = unavailable()
        return [*found, reason] if reason else found

    @classmethod
    def preference(cls, request: AttentionRequest) -> Preference:
        """Return GOOD."""
        return Preference(Band.GOOD, "one call for all short queries of a step")

    @classmethod
    def cache_specs(cls, request: AttentionRequest) -> Sequence[CacheSpec]:
        """Return the layout of ``torch_sdpa``: heads outside tokens."""
        return TorchSdpaBackend.cache_specs(request)

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> MetadataBuilder:
        """See AttentionBackend."""
        from jackfield_attention.native_cpu_layer import NativeMetadataBuilder

        return NativeMetadataBuilder(env)

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> NativeLayer:
        """See AttentionBackend."""
        from jackfield_attention.native_cpu_layer import NativeLayer

        return NativeLayer(env)
