"""``flex``: paged attention by torch's flex_attention, where masks and what is done to scores are functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

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
from jackfield_attention.torch_sdpa import TorchSdpaBackend

if TYPE_CHECKING:
    from jackfield_attention.flex_layer import FlexEncoderLayer, FlexLayer

SMALLEST_HEAD = 16
"""Least size of a head that kernels can be compiled for."""


class FlexBackend(AttentionBackend):
    """One call for all sequences of a step, whose keys are gathered from their pages one after another. On a CPU torch
    computes it as it is written; elsewhere it is compiled, which takes its time when a shape comes for the first time.
    """

    name = "flex"
    summary = "attention by torch's flex_attention: for masks and scores that other kernels lack"
    kinds: ClassVar[frozenset[str]] = frozenset({"full", "sliding", "chunked_local", "encoder"})
    features: ClassVar[frozenset[str]] = frozenset(
        {"prefill", "chunked_prefill", "decode", "mixed", "gqa", "softcap", "alibi", "sinks", "diff_kv", "tree"}
    )
    dtypes: ClassVar[frozenset[str]] = TorchSdpaBackend.dtypes
    device_types: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    host_lengths: ClassVar[HostLengths] = HostLengths.EXACT
    opt_in: ClassVar[bool] = True
    """Contexts are copied in every layer, and kernels are compiled while requests wait."""

    @classmethod
    def check(cls, request: AttentionRequest) -> Sequence[Reason]:
        """Reject what ``torch_sdpa`` has no definition of either, and what no kernel can be compiled for."""
        found = list(TorchSdpaBackend.check(request))
        if request.device is None or request.device.type == "cpu":
            return found
        if request.dtype == "float64":
            remedy = "use float32, or a CPU"
            found.append(Reason("dtype", "dtype", "float64 is computed on CPUs only", remedy))
        size = min(request.head_size, request.value_head_size or request.head_size)
        if size < SMALLEST_HEAD:
            detail = f"{size} is below {SMALLEST_HEAD}, the least that kernels are compiled for"
            found.append(Reason("head_size", "head_size", detail))
        return found

    @classmethod
    def preference(cls, request: AttentionRequest) -> Preference:
        """Return FALLBACK."""
        return Preference(Band.FALLBACK, "copies contexts before it attends")

    @classmethod
    def cache_specs(cls, request: AttentionRequest) -> Sequence[CacheSpec]:
        """Return the layout of ``torch_sdpa``."""
        return TorchSdpaBackend.cache_specs(request)

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> MetadataBuilder:
        """See AttentionBackend."""
        from jackfield_attention.flex_metadata import FlexMetadataBuilder

        return FlexMetadataBuilder(env)

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> FlexLayer | FlexEncoderLayer:
        """See AttentionBackend."""
        from jackfield_attention.flex_layer import FlexEncoderLayer, FlexLayer

        return FlexEncoderLayer(env) if env.request.kind == "encoder" else FlexLayer(env)
