"""``triton_states``: layers with states, whose single tokens, and chunks of Mamba-2, are advanced by Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

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
from jackfield_attention.states import state_reasons
from jackfield_attention.torch_linear import TorchDeltaBackend, TorchLinearBackend
from jackfield_attention.torch_mamba import TorchMambaBackend
from jackfield_attention.torch_short_conv import TorchShortConvBackend
from jackfield_triton.launch import capability_reasons

REFERENCES: Mapping[str, type[AttentionBackend]] = {
    kind: backend
    for backend in (TorchMambaBackend, TorchLinearBackend, TorchDeltaBackend, TorchShortConvBackend)
    for kind in backend.kinds
}
"""Whose layout of states is shared, by kind."""


class TritonStatesBackend(AttentionBackend):
    """Single new tokens advance states in one kernel for each part of a layer. Chunks of Mamba-2 and of convolutions
    have kernels too; those of other layers are torch's matrix products.
    """

    name = "triton_states"
    summary = "states in Triton: one kernel for a token; chunks of Mamba-2 and convolutions too"
    kinds: ClassVar[frozenset[str]] = frozenset(REFERENCES)
    features: ClassVar[frozenset[str]] = frozenset({"prefill", "chunked_prefill", "decode", "mixed", "gqa"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "bfloat16", "float16"})
    device_types: ClassVar[frozenset[str]] = frozenset({"cuda"})
    requires: ClassVar[tuple[str, ...]] = ("triton>=3.2",)
    opt_in: ClassVar[bool] = True
    """Its kernels have run on an H200, but no whole model has with them."""
    graph_support: ClassVar[GraphSupport] = GraphSupport.DECODE
    host_lengths: ClassVar[HostLengths] = HostLengths.NONE

    @classmethod
    def check(cls, request: AttentionRequest) -> Sequence[Reason]:
        """Reject old devices, and states in narrow types."""
        return [*state_reasons(request), *capability_reasons(request.device)]

    @classmethod
    def preference(cls, request: AttentionRequest) -> Preference:
        """Return GOOD."""
        return Preference(Band.GOOD, "a state is read and written once for a token")

    @classmethod
    def cache_specs(cls, request: AttentionRequest) -> Sequence[CacheSpec]:
        """Return the reference's layout."""
        return REFERENCES[request.kind].cache_specs(request)

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> MetadataBuilder:
        """See AttentionBackend."""
        from jackfield_attention.triton_states_layer import TritonStateBuilder

        return TritonStateBuilder(env)

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> Any:
        """See AttentionBackend."""
        from jackfield_attention.triton_states_layer import LAYERS

        return LAYERS[env.request.kind](env)
