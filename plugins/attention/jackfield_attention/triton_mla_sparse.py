"""``triton_mla_sparse``: latent attention to chosen tokens, the indexer's scores and attention in Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import AttentionEnv, AttentionRequest, Band, CacheSpec, MetadataBuilder, Option, Preference
from jackfield_attention.torch_mla_sparse import TorchMlaSparseBackend
from jackfield_attention.triton_mla import TritonMlaBackend

if TYPE_CHECKING:
    from jackfield_attention.triton_mla_sparse_layer import TritonMlaSparseLayer


class TritonMlaSparseBackend(TritonMlaBackend):
    """Each new token attends to its own tokens in the space of the latents, and these are split among programs. Whole
    prompts that are no longer than what may be chosen go through expanded keys and values, as in ``triton_mla``.
    """

    name = "triton_mla_sparse"
    summary = "latent attention to chosen tokens in Triton: index scores, gathered latents"
    kinds: ClassVar[frozenset[str]] = frozenset({"mla_sparse"})
    features: ClassVar[frozenset[str]] = TorchMlaSparseBackend.features - {"cache_scales"}
    opt_in: ClassVar[bool] = True
    """Proved in the interpreter and compiled for capability 9.0, but no device has run it yet."""
    options: ClassVar[Mapping[str, Option]] = {
        **TritonMlaBackend.options,
        "part_numbers": Option(int, 1 << 27, "scores that are computed at once, which bounds memory"),
        "score_tile": Option(int, 0, "index keys of a program; 0: chosen", (0, 16, 32, 64, 128, 256)),
    }

    @classmethod
    def preference(cls, request: AttentionRequest) -> Preference:
        """Return GOOD."""
        return Preference(Band.GOOD, "Triton kernels over chosen latents")

    @classmethod
    def cache_specs(cls, request: AttentionRequest) -> Sequence[CacheSpec]:
        """Return the layout of ``torch_mla_sparse``."""
        return TorchMlaSparseBackend.cache_specs(request)

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> MetadataBuilder:
        """See AttentionBackend."""
        from jackfield_attention.triton_mla_sparse_metadata import TritonSparseMetadataBuilder

        return TritonSparseMetadataBuilder(env)

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> TritonMlaSparseLayer:
        """See AttentionBackend."""
        from jackfield_attention.triton_mla_sparse_layer import TritonMlaSparseLayer

        return TritonMlaSparseLayer(env)
