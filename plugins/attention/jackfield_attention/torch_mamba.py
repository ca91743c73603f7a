"""``torch_mamba``: selective state spaces in plain torch. The reference on every device, and the default on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

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

if TYPE_CHECKING:
    from jackfield_attention.torch_mamba_layer import Mamba1Layer, Mamba2Layer


class TorchMambaBackend(AttentionBackend):
    """Mamba-1 by a scan over chunks, Mamba-2 by chunks of its attention form. States are float32."""

    name = "torch_mamba"
    summary = "Mamba-1 and Mamba-2 in plain torch; reference everywhere"
    kinds: ClassVar[frozenset[str]] = frozenset({"mamba1", "mamba2"})
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
        """Return one layout: ``conv`` [C, W - 1] and ``state``: [I, N] for Mamba-1, [H, N, V] for Mamba-2."""
        heads, keys, values = request.local_heads, request.head_size, request.value_head_size
        shape = (heads, keys) if request.kind == "mamba1" else (heads, keys, values)
        return [state_spec(request, Plane("state", "float32", shape, shard_dim=0))]

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> MetadataBuilder:
        """See AttentionBackend."""
        from jackfield_attention.state_steps import StateMetadataBuilder

        return StateMetadataBuilder(env)

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> Mamba1Layer | Mamba2Layer:
        """See AttentionBackend."""
        from jackfield_attention.torch_mamba_layer import Mamba1Layer, Mamba2Layer

        return Mamba1Layer(env) if env.request.kind == "mamba1" else Mamba2Layer(env)
