"""``torch_mla``: multi-head latent attention in plain torch. The reference on every device, and the default on CPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import (
    BLOCK,
    AttentionBackend,
    AttentionEnv,
    AttentionRequest,
    CacheSpec,
    HostLengths,
    MetadataBuilder,
    Option,
    Plane,
    Preference,
    Reason,
)
from jackfield_attention.cache_types import FLOATS, INTEGERS, store_reasons
from jackfield_attention.states import reference_preference

if TYPE_CHECKING:
    from jackfield_attention.torch_mla_layer import MlaLayer


class TorchMlaBackend(AttentionBackend):
    """Short queries attend in the latent space (absorbed form), long ones over expanded keys and values, whose context
    is expanded part by part and merged.
    """

    name = "torch_mla"
    summary = "multi-head latent attention in plain torch; reference everywhere"
    kinds: ClassVar[frozenset[str]] = frozenset({"mla"})
    features: ClassVar[frozenset[str]] = frozenset(
        {"prefill", "chunked_prefill", "decode", "mixed", "gqa", "cache_scales", "tree"}
    )
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "bfloat16", "float16", "float64"})
    host_lengths: ClassVar[HostLengths] = HostLengths.EXACT
    options: ClassVar[Mapping[str, Option]] = {
        "context_part": Option(int, 4096, "tokens of the context whose keys and values are expanded at once"),
    }

    @classmethod
    def check(cls, request: AttentionRequest) -> Sequence[Reason]:
        """See Plugin: latents are stored in no integer type, since a latent and a rotary key
        would share a scale."""
        if request.cache_dtype in INTEGERS:
            detail = f"{request.cache_dtype} is no type that latents can be stored in"
            return [Reason("cache_dtype", "cache_dtype", detail, f"use one of: {', '.join((request.dtype, *FLOATS))}")]
        return store_reasons(request, ())

    @classmethod
    def preference(cls, request: AttentionRequest) -> Preference:
        """Return SUPPORTED on a CPU, else FALLBACK."""
        return reference_preference(request)

    @classmethod
    def cache_specs(cls, request: AttentionRequest) -> Sequence[CacheSpec]:
        """Return one layout: a latent with its rotary key for each token, the same on every rank."""
        width = request.extra["latent_size"] + request.extra["rope_size"]
        return [CacheSpec((Plane("latent", request.cache_dtype or request.dtype, (BLOCK, width)),))]

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> MetadataBuilder:
        """See AttentionBackend."""
        from jackfield_attention.torch_sdpa_layer import SdpaMetadataBuilder

        return SdpaMetadataBuilder(env)

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> MlaLayer:
        """See AttentionBackend."""
        from jackfield_attention.torch_mla_layer import MlaLayer

        return MlaLayer(env)
