"""``triton_mla``: multi-head latent attention with decode in Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    Option,
    Preference,
    Reason,
)
from jackfield_attention.torch_mla import TorchMlaBackend
from jackfield_attention.triton_backend import narrow_reasons
from jackfield_triton.launch import capability_reasons

if TYPE_CHECKING:
    from jackfield_attention.triton_mla_layer import TritonMlaLayer

STORED = frozenset({"float8_e4m3fn"})
"""Types of latents that are narrower than the computation's."""


class TritonMlaBackend(AttentionBackend):
    """Single new tokens attend in the latent space, the keys split among programs; longer queries over keys and values
    that are expanded part by part.
    """

    name = "triton_mla"
    summary = "latent attention in Triton: split-key decode over latents, tiled prefill"
    kinds: ClassVar[frozenset[str]] = frozenset({"mla"})
    features: ClassVar[frozenset[str]] = TorchMlaBackend.features - {"cache_scales", "tree"}
    dtypes: ClassVar[frozenset[str]] = frozenset({"bfloat16", "float16", "float32"})
    device_types: ClassVar[frozenset[str]] = frozenset({"cuda"})
    requires: ClassVar[tuple[str, ...]] = ("triton>=3.2",)
    graph_support: ClassVar[GraphSupport] = GraphSupport.DECODE
    host_lengths: ClassVar[HostLengths] = HostLengths.UPPER_BOUND
    options: ClassVar[Mapping[str, Option]] = {
        **TorchMlaBackend.options,
        "decode_splits": Option(int, 0, "parts that the keys of a decoding sequence are split into; 0: by batch size"),
        "decode_tile": Option(int, 0, "keys in a tile of decode; 0: chosen", (0, 16, 32, 64)),
        "decode_heads": Option(int, 0, "query heads of a program; 0: chosen", (0, 16, 32, 64)),
        "pdl": Option(bool, True, "start kernels while the ones before them drain, from capability 9.0 on"),
    }

    @classmethod
    def check(cls, request: AttentionRequest) -> Sequence[Reason]:
        """Reject old devices, and latents in types that the kernels do not read."""
        found = capability_reasons(request.device)
        if request.cache_dtype not in ("", request.dtype, *STORED):
            known = ", ".join((request.dtype, *STORED))
            detail = f"{request.cache_dtype} is no type that latents can be stored in"
            found.append(Reason("cache_dtype", "cache_dtype", detail, f"use one of: {known}"))
        return [*found, *narrow_reasons(request)]

    @classmethod
    def preference(cls, request: AttentionRequest) -> Preference:
        """Return GOOD."""
        return Preference(Band.GOOD, "Triton kernels over latents")

    @classmethod
    def cache_specs(cls, request: AttentionRequest) -> Sequence[CacheSpec]:
        """Return the layout of ``torch_mla``."""
        return TorchMlaBackend.cache_specs(request)

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> MetadataBuilder:
        """See AttentionBackend."""
        from jackfield_attention.triton_mla_metadata import TritonMlaMetadataBuilder

        return TritonMlaMetadataBuilder(env)

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> TritonMlaLayer:
        """See AttentionBackend."""
        from jackfield_attention.triton_mla_layer import TritonMlaLayer

        return TritonMlaLayer(env)
