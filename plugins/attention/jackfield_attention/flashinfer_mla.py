"""``flashinfer_mla``: decode over latents through FlashInfer, everything else as in ``triton_mla``, on one cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import (
    AttentionEnv,
    AttentionRequest,
    Band,
    GraphSupport,
    HostLengths,
    MetadataBuilder,
    Option,
    Preference,
    Reason,
)
from jackfield_attention.flashinfer import FA3_CAPABILITY, SHORT_NAMES, can_compile, has_module, kernels_for
from jackfield_attention.triton_mla import TritonMlaBackend

if TYPE_CHECKING:
    from jackfield_attention.flashinfer_mla_layer import FlashInferMlaLayer

SIZES: Mapping[str, int] = {"latent_size": 512, "rope_size": 64}
"""Features of a latent and of a rotated key that there are kernels for."""
VECTOR = 8
"""Numbers of 16 bits that the kernels load at once, from addresses that are a multiple of as many."""
MANY_HEADS = 64
"""From so many heads on matrix units are what limits, and ``fa3`` may be ahead of ``triton_mla``."""
WORKSPACE_MB = 32
"""The kernels leave parts of 128 rows of a latent for each multiprocessor, 129 KiB: room for 255 of them."""


class FlashInferMlaBackend(TritonMlaBackend):
    """Single new tokens go to FlashInfer, which plans them once for a step on the host; so no step is recorded.

    Source: FlashInfer (arXiv:2501.01005); ``fa3`` are its kernels for capability 9.0, ``fa2`` those for 8.0 and later.
    """

    name = "flashinfer_mla"
    summary = "latent attention: FlashInfer for decode, Triton for prompts"
    dtypes: ClassVar[frozenset[str]] = frozenset(SHORT_NAMES)
    requires: ClassVar[tuple[str, ...]] = ("triton>=3.2", "flashinfer-python>=0.6.18")
    graph_support: ClassVar[GraphSupport] = GraphSupport.NONE
    host_lengths: ClassVar[HostLengths] = HostLengths.EXACT
    opt_in: ClassVar[bool] = True
    """Proved against a stand-in for FlashInfer, but no device has run it yet."""
    options: ClassVar[Mapping[str, Option]] = {
        "context_part": TritonMlaBackend.options["context_part"],
        "pdl": TritonMlaBackend.options["pdl"],
        "kernels": Option(str, "", "fa2 or fa3; empty: fa3 on capability 9.0, else fa2", ("", "fa2", "fa3")),
        "workspace_mb": Option(int, WORKSPACE_MB, "device memory for parts of contexts that were split, in MiB"),
    }

    @classmethod
    def check(cls, request: AttentionRequest) -> Sequence[Reason]:
        """Reject old devices, narrow latents, sizes without a kernel, heads that cannot be loaded whole, and machines
        that can neither load nor compile the kernels.
        """
        found = list(super().check(replace(request, cache_dtype="")))
        if request.cache_dtype not in ("", request.dtype):
            detail = f"{request.cache_dtype} differs from the computation type {request.dtype}"
            found.append(Reason("cache_dtype", "cache_dtype", detail, f"use {request.dtype}, or choose triton_mla"))
        for name, size in SIZES.items():
            if request.extra.get(name) != size:
                found.append(Reason(name, f"extra.{name}", f"{request.extra.get(name)} is not {size}"))
        if request.head_size % VECTOR:
            found.append(Reason("head_size", "head_size", f"{request.head_size} is not a multiple of {VECTOR}"))
        if request.device is not None and not (is_compiled(request) or can_compile()):
            detail = "the kernels are not compiled yet, and there is no CUDA compiler (nvcc)"
            found.append(Reason("toolkit", "device", detail, "install the CUDA toolkit, or choose triton_mla"))
        return found

    @classmethod
    def preference(cls, request: AttentionRequest) -> Preference:
        """Return GOOD for 64 heads of this rank and more on capability 9.0: there decode of 128 heads took 0.91 of
        ``triton_mla``'s time as a kernel alone. Otherwise SUPPORTED: that of 16 heads took 1.16 to 1.24.
        """
        kernels, heads = kernels_for(request, ""), request.local_heads
        many = request.device is not None and request.device.capability == FA3_CAPABILITY and heads >= MANY_HEADS
        why = f"{kernels} kernels of FlashInfer for decode of {heads} heads, not recorded"
        return Preference(Band.GOOD if many else Band.SUPPORTED, why)

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> MetadataBuilder:
        """See AttentionBackend."""
        from jackfield_attention.flashinfer_mla_layer import FlashInferMlaMetadataBuilder

        return FlashInferMlaMetadataBuilder(env)

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> FlashInferMlaLayer:
        """See AttentionBackend."""
        from jackfield_attention.flashinfer_mla_layer import FlashInferMlaLayer

        return FlashInferMlaLayer(env)


def is_compiled(request: AttentionRequest) -> bool:
    """Return whether there is a module for such latents."""
    kind = SHORT_NAMES.get(request.dtype, "")
    sizes = f"head_dim_ckv_{SIZES['latent_size']}_head_dim_kpe_{SIZES['rope_size']}_profiler_False"
    types = f"dtype_q_{kind}_dtype_kv_{kind}_dtype_o_{kind}_dtype_idx_i32"
    ending = "_sm90" if kernels_for(request, "") == "fa3" else ""
    return has_module(f"batch_mla_attention_{types}_{sizes}{ending}")
