"""``torch_short_conv``: short convolutions in plain torch. The reference on every device, and the default on CPUs."""

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
    Preference,
    Reason,
)
from jackfield_attention.states import reference_preference, state_reasons, state_spec

if TYPE_CHECKING:
    from jackfield_attention.torch_short_conv_layer import ShortConvLayer


class TorchShortConvBackend(AttentionBackend):
    """Layers that mix tokens by a short convolution alone; what they keep are its last inputs."""

    name = "torch_short_conv"
    summary = "short convolutions in plain torch; reference everywhere"
    kinds: ClassVar[frozenset[str]] = frozenset({"short_conv"})
    features: ClassVar[frozenset[str]] = frozenset({"prefill", "chunked_prefill", "decode", "mixed"})
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
        """Return one layout: ``conv`` [C, W - 1]."""
        return [state_spec(request)]

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> MetadataBuilder:
        """See AttentionBackend."""
        from jackfield_attention.state_steps import StateMetadataBuilder

        return StateMetadataBuilder(env)

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> ShortConvLayer:
        """See AttentionBackend."""
        from jackfield_attention.torch_short_conv_layer import ShortConvLayer

        return ShortConvLayer(env)
