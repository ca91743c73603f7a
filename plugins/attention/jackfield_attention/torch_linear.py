"""``torch_linear`` and ``torch_delta``: linear attention and the gated delta rule in plain torch. The references on
every device, and the defaults on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jackfield.interfaces import (
    AttentionBackend,
    AttentionEnv,
    AttentionRequest,
    CacheSpec,
    HostLengths,
    MetadataBuilder,
    Plane,
    Preference,
    Reason,
)
from jackfield_attention.states import reference_preference, state_reasons, state_spec


class TorchLinearBackend(AttentionBackend):
    """Linear attention with a decay for each head, chunk by chunk. States are float32."""

    name = "torch_linear"
    summary = "linear attention with decay in plain torch; reference everywhere"
    kinds: ClassVar[frozenset[str]] = frozenset({"linear"})
    features: ClassVar[frozenset[str]] = frozenset({"prefill", "chunked_prefill", "decode", "mixed", "gqa"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "bfloat16", "float16", "float64"})
    host_lengths: ClassVar[HostLengths] = HostLengths.NONE

    @classmethod
    def check(cls, request: AttentionRequest) -> Sequence[Reason]:
        """See Plugin."""
        return state_reasons(request)

    @classmethod
    def preference(cls, request: AttentionRequest) -> Preference:
        """Return SUPPORTED on a CPU, else FALLBACK."""
        return reference_preference(request)

    @classmethod
    def cache_specs(cls, request: AttentionRequest) -> Sequence[CacheSpec]:
        """Return one layout: ``state`` [H, K, V], and ``conv`` [C, W - 1] where the layer has a short convolution."""
        shape = (request.local_heads, request.head_size, request.value_head_size)
        return [state_spec(request, Plane("state", "float32", shape, shard_dim=0))]

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> MetadataBuilder:
        """See AttentionBackend."""
        from jackfield_attention.state_steps import StateMetadataBuilder

        return StateMetadataBuilder(env)

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> Any:
        """See AttentionBackend."""
        from jackfield_attention.torch_linear_layer import LinearLayer

        return LinearLayer(env)


class TorchDeltaBackend(TorchLinearBackend):
    """Gated DeltaNet and Kimi Delta Attention: chunks by their WY form, single tokens by the recurrence."""

    name = "torch_delta"
    summary = "Gated DeltaNet and Kimi Delta Attention in plain torch; reference everywhere"
    kinds: ClassVar[frozenset[str]] = frozenset({"gdn", "kda"})

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> Any:
        """See AttentionBackend."""
        from jackfield_attention.torch_linear_layer import DeltaLayer

        return DeltaLayer(env)
