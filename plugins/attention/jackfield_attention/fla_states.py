"""``fla``: gated delta networks, Kimi Delta Attention and linear attention by the kernels of flash-linear-attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jackfield.interfaces import (
    AttentionBackend,
    AttentionEnv,
    AttentionRequest,
    Band,
    CacheSpec,
    HostLengths,
    MetadataBuilder,
    Preference,
    Reason,
)
from jackfield_attention.states import state_reasons
from jackfield_attention.torch_linear import TorchDeltaBackend, TorchLinearBackend
from jackfield_triton.launch import capability_reasons

DELTA = TorchDeltaBackend.kinds
"""Kinds of the delta rule; the others decay, and no more."""
MOST_KEYS = 256
"""Largest size of a key that kernels of the delta rule take."""


class FlaStatesBackend(AttentionBackend):
    """Prompts go chunk by chunk, all sequences of a step at once; single tokens by the recurrence. States are those of
    the references, and float32.

    Source: flash-linear-attention (https://github.com/fla-org/flash-linear-attention), version 0.6.
    """

    name = "fla"
    summary = "delta rules and linear attention by flash-linear-attention's kernels"
    kinds: ClassVar[frozenset[str]] = DELTA | TorchLinearBackend.kinds
    features: ClassVar[frozenset[str]] = frozenset({"prefill", "chunked_prefill", "decode", "mixed", "gqa"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"bfloat16"})
    """Kernels multiply float32 as TF32, and keep states between chunks in the type of the keys, which float16 may be
    too narrow for.
    """
    device_types: ClassVar[frozenset[str]] = frozenset({"cuda"})
    requires: ClassVar[tuple[str, ...]] = ("fla-core>=0.6", "triton>=3.3")
    opt_in: ClassVar[bool] = True
    """What it hands to kernels is proved against their references, but no device has run it yet."""
    host_lengths: ClassVar[HostLengths] = HostLengths.NONE

    @classmethod
    def check(cls, request: AttentionRequest) -> Sequence[Reason]:
        """Reject old devices, long keys, and states in narrow types."""
        found = [*state_reasons(request), *capability_reasons(request.device)]
        if request.kind in DELTA and request.head_size > MOST_KEYS:
            found.append(Reason("head_size", "head_size", f"{request.head_size} is above {MOST_KEYS}"))
        return found

    @classmethod
    def preference(cls, request: AttentionRequest) -> Preference:
        """Return SUPPORTED: it has not been measured."""
        return Preference(Band.SUPPORTED, "kernels of flash-linear-attention")

    @classmethod
    def cache_specs(cls, request: AttentionRequest) -> Sequence[CacheSpec]:
        """Return the reference's layout."""
        reference = TorchDeltaBackend if request.kind in DELTA else TorchLinearBackend
        return reference.cache_specs(request)

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> MetadataBuilder:
        """See AttentionBackend."""
        from jackfield_attention.fla_states_layer import FlaMetadataBuilder

        return FlaMetadataBuilder(env)

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> Any:
        """See AttentionBackend."""
        from jackfield_attention.fla_states_layer import LAYERS

        return LAYERS[env.request.kind](env)
