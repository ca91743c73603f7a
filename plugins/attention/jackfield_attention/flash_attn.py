"""``flash_attn``: prefill by torch's own FlashAttention over varying lengths, decode as in ``triton``, on one cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import AttentionEnv, AttentionRequest, Band, MetadataBuilder, Preference, Reason
from jackfield_attention.triton_backend import TritonBackend

if TYPE_CHECKING:
    from jackfield_attention.flash_attn_layer import FlashLayer


class FlashAttnBackend(TritonBackend):
    """Keys and values of long queries are gathered from their pages and go through ``varlen_attn``."""

    name = "flash_attn"
    summary = "torch's FlashAttention for prefill, Triton for decode"
    kinds: ClassVar[frozenset[str]] = frozenset({"full", "sliding"})
    features: ClassVar[frozenset[str]] = frozenset({"prefill", "chunked_prefill", "decode", "mixed", "gqa"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"bfloat16", "float16"})
    requires: ClassVar[tuple[str, ...]] = ("triton>=3.2", "torch>=2.11")
    narrow: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def check(cls, request: AttentionRequest) -> Sequence[Reason]:
        """Reject what ``triton`` rejects, and head sizes that are no multiple of 8."""
        found = list(super().check(request))
        if request.head_size % 8:
            found.append(Reason("head_size", "head_size", f"{request.head_size} is not a multiple of 8"))
        return found

    @classmethod
    def preference(cls, request: AttentionRequest) -> Preference:
        """Return SUPPORTED: on an H200 the pages-only prefill of ``triton`` is 1.35 times as fast."""
        return Preference(Band.SUPPORTED, "FlashAttention for prefill")

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> MetadataBuilder:
        """See AttentionBackend."""
        from jackfield_attention.flash_attn_layer import FlashMetadataBuilder

        return FlashMetadataBuilder(env)

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> FlashLayer:
        """See AttentionBackend."""
        from jackfield_attention.flash_attn_layer import FlashLayer

        return FlashLayer(env)
