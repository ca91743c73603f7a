"""``torch_mla_sparse``: latent attention to tokens that an indexer chooses, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import (
    BLOCK,
    AttentionEnv,
    AttentionRequest,
    CacheSpec,
    MetadataBuilder,
    Option,
    Plane,
)
from jackfield_attention.torch_mla import TorchMlaBackend

if TYPE_CHECKING:
    from jackfield_attention.torch_mla_sparse_layer import SparseMlaLayer


class TorchMlaSparseBackend(TorchMlaBackend):
    """Sequences that are no longer than the number of tokens that may be chosen go through ``torch_mla``'s forms, since
    nothing is left out there; others attend in the space of the latents, each query to its own tokens.
    """

    name = "torch_mla_sparse"
    summary = "latent attention to chosen tokens in plain torch; reference everywhere"
    kinds: ClassVar[frozenset[str]] = frozenset({"mla_sparse"})
    features: ClassVar[frozenset[str]] = TorchMlaBackend.features - {"tree"}
    options: ClassVar[Mapping[str, Option]] = {
        **TorchMlaBackend.options,
        "part_numbers": Option(int, 1 << 24, "numbers that are computed at once, which bounds memory"),
    }

    @classmethod
    def cache_specs(cls, request: AttentionRequest) -> Sequence[CacheSpec]:
        """Return one layout: that of ``torch_mla``, and an index key for each token; the same on every rank."""
        kind, size = request.cache_dtype or request.dtype, request.extra["index_size"]
        (latents,) = TorchMlaBackend.cache_specs(request)
        return [CacheSpec((*latents.planes, Plane("index", kind, (BLOCK, size))))]

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> MetadataBuilder:
        """See AttentionBackend."""
        from jackfield_attention.torch_mla_sparse_layer import SparseMetadataBuilder

        return SparseMetadataBuilder(env)

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> SparseMlaLayer:
        """See AttentionBackend."""
        from jackfield_attention.torch_mla_sparse_layer import SparseMlaLayer

        return SparseMlaLayer(env)
