"""``torch_sdpa``: paged attention in plain torch. The reference on every device, and the default on CPUs."""

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
from jackfield_attention.cache_types import store_planes, store_reasons

if TYPE_CHECKING:
    from jackfield_attention.torch_sdpa_encoder import SdpaEncoderLayer
    from jackfield_attention.torch_sdpa_layer import SdpaLayer


class TorchSdpaBackend(AttentionBackend):
    """Batched products over cache blocks for short queries, torch's scaled_dot_product_attention for long ones."""

    name = "torch_sdpa"
    summary = "paged attention in plain torch; reference everywhere"
    kinds: ClassVar[frozenset[str]] = frozenset({"full", "sliding", "chunked_local", "encoder"})
    features: ClassVar[frozenset[str]] = frozenset(
        {"prefill", "chunked_prefill", "decode", "mixed", "gqa", "softcap", "alibi", "sinks", "diff_kv", "tree"}
        | {"dual_chunk", "cache_scales"}
    )
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "bfloat16", "float16", "float64"})
    graph_support: ClassVar[GraphSupport] = GraphSupport.NONE
    host_lengths: ClassVar[HostLengths] = HostLengths.EXACT

    @classmethod
    def check(cls, request: AttentionRequest) -> Sequence[Reason]:
        """See Plugin. Soft caps and linear biases together are no model's: which comes first is not known. Nor are
        sinks with linear biases.
        """
        sizes = (request.head_size, request.value_head_size or request.head_size)
        found = [] if request.kind == "encoder" else store_reasons(request, sizes)
        if request.softcap and "alibi" in request.needs:
            found.append(Reason("softcap", "softcap", "a soft cap and linear biases in one layer"))
        if {"sinks", "alibi"} <= request.needs:
            found.append(Reason("sinks", "needs", "sinks and linear biases in one layer"))
        if "dual_chunk" in request.needs:
            extra = sorted({"softcap", "alibi", "sinks", "tree"} & request.needs)
            found += [Reason(need, "needs", f"dual-chunk attention has no {need}") for need in extra]
            if request.kind != "full":
                found.append(Reason("dual_chunk", "kind", f"dual-chunk attention of kind {request.kind}"))
        if request.kind == "encoder":
            extra = sorted({"softcap", "alibi", "sinks", "tree"} & request.needs)
            found += [Reason(need, "needs", f"encoder layers have no {need}") for need in extra]
        return found

    @classmethod
    def preference(cls, request: AttentionRequest) -> Preference:
        """Return SUPPORTED on a CPU, where torch's kernels are the tuned ones, else FALLBACK."""
        if request.device is not None and request.device.type == "cpu":
            return Preference(Band.SUPPORTED, "torch's CPU kernels")
        return Preference(Band.FALLBACK, "reference")

    @classmethod
    def cache_specs(cls, request: AttentionRequest) -> Sequence[CacheSpec]:
        """Return one layout: heads outside tokens, so that a block's head is one contiguous matrix. Encoders keep
        nothing.
        """
        if request.kind == "encoder":
            return [CacheSpec(())]
        heads, value_size = request.local_kv_heads, request.value_head_size or request.head_size
        planes = (*store_planes(request, "k", heads, request.head_size), *store_planes(request, "v", heads, value_size))
        return [CacheSpec(planes, window=request.window)]

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> MetadataBuilder:
        """See AttentionBackend."""
        if env.request.kind == "encoder":
            from jackfield_attention.torch_sdpa_encoder import EncoderMetadataBuilder

            return EncoderMetadataBuilder(env)
        if "dual_chunk" in env.request.needs:
            from jackfield_attention.torch_dual_chunk import DualChunkMetadataBuilder

            return DualChunkMetadataBuilder(env)
        from jackfield_attention.torch_sdpa_layer import SdpaMetadataBuilder

        return SdpaMetadataBuilder(env)

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> SdpaLayer | SdpaEncoderLayer:
        """See AttentionBackend."""
        if env.request.kind == "encoder":
            from jackfield_attention.torch_sdpa_encoder import SdpaEncoderLayer

            return SdpaEncoderLayer(env)
        if "dual_chunk" in env.request.needs:
            from jackfield_attention.torch_dual_chunk import DualChunkLayer

            return DualChunkLayer(env)
        from jackfield_attention.torch_sdpa_layer import SdpaLayer

        return SdpaLayer(env)
