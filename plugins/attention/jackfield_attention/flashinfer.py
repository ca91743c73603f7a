"""``flashinfer``: prompts through FlashInfer's paged prefill, everything else as in ``triton``, on one cache."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import AttentionEnv, AttentionRequest, Band, MetadataBuilder, Option, Preference, Reason
from jackfield_attention.triton_backend import TritonBackend

if TYPE_CHECKING:
    from jackfield_attention.flashinfer_layer import FlashInferLayer

HEAD_SIZES = (64, 128, 256)
"""Sizes that there are kernels for."""
FA3_CAPABILITY = (9, 0)
DISTRIBUTION = "flashinfer-python"
WORKSPACE_MB = 384
PLANS_IN_TURN = 2
"""Plans that are kept. Each has pinned memory, which is copied when the device comes to it: by then the host may plan
the next step, but not the one after it.
"""
TOOLKIT = Path("/usr/local/cuda/bin/nvcc")
"""Where the compiler is, if it is not on the path."""
SHORT_NAMES = {"bfloat16": "bf16", "float16": "f16"}


class FlashInferBackend(TritonBackend):
    """Long queries go to FlashInfer, which plans them once for a step; decode is recorded into graphs as ``triton``'s.

    Source: FlashInfer (arXiv:2501.01005); ``fa3`` are the kernels of FlashAttention-3 (arXiv:2407.08608), which need
    capability 9.0, and ``fa2`` those of FlashAttention-2.
    """

    name = "flashinfer"
    summary = "FlashInfer for prompts, Triton for decode"
    kinds: ClassVar[frozenset[str]] = frozenset({"full", "sliding"})
    features: ClassVar[frozenset[str]] = TritonBackend.features - {"sinks", "cache_scales"}
    dtypes: ClassVar[frozenset[str]] = frozenset(SHORT_NAMES)
    requires: ClassVar[tuple[str, ...]] = ("triton>=3.2", "flashinfer-python>=0.6.18")
    narrow: ClassVar[frozenset[str]] = frozenset()
    options: ClassVar[Mapping[str, Option]] = {
        **TritonBackend.options,
        "kernels": Option(str, "", "fa2 or fa3; empty: fa3 on capability 9.0, else fa2", ("", "fa2", "fa3")),
        "workspace_mb": Option(int, WORKSPACE_MB, "device memory for what FlashInfer plans and splits, in MiB"),
    }

    @classmethod
    def check(cls, request: AttentionRequest) -> Sequence[Reason]:
        """Reject what ``triton`` rejects, head sizes without a kernel, and machines that can neither load nor compile
        the kernels.
        """
        found = list(super().check(request))
        if request.head_size not in HEAD_SIZES:
            sizes = ", ".join(map(str, HEAD_SIZES))
            found.append(Reason("head_size", "head_size", f"{request.head_size} is none of {sizes}"))
        if request.device is not None and not (is_compiled(request) or can_compile()):
            detail = "the kernels are not compiled yet, and there is no CUDA compiler (nvcc)"
            found.append(Reason("toolkit", "device", detail, "install the CUDA toolkit, or choose triton"))
        return found

    @classmethod
    def preference(cls, request: AttentionRequest) -> Preference:
        """Return BEST on capability 9.0 where kernels are compiled: there attention of prompts of 2,048 tokens and more
        takes 0.8 times as long as with ``triton``. Otherwise SUPPORTED: nobody should wait minutes for a compiler who
        did not ask to.
        """
        kernels = kernels_for(request, "")
        if request.device is None or request.device.capability < FA3_CAPABILITY:
            return Preference(Band.SUPPORTED, f"{kernels} kernels of FlashInfer for prompts")
        if not is_compiled(request):
            return Preference(Band.SUPPORTED, f"{kernels} kernels of FlashInfer would be compiled first")
        return Preference(Band.BEST, f"{kernels} kernels of FlashInfer for prompts, compiled already")

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> MetadataBuilder:
        """See AttentionBackend."""
        from jackfield_attention.flashinfer_layer import FlashInferMetadataBuilder

        return FlashInferMetadataBuilder(env)

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> FlashInferLayer:
        """See AttentionBackend."""
        from jackfield_attention.flashinfer_layer import FlashInferLayer

        return FlashInferLayer(env)


def kernels_for(request: AttentionRequest, wanted: str) -> str:
    """Return ``fa3`` or ``fa2``: what was ``wanted``, or what the device is known to run."""
    if wanted:
        return wanted
    capability = (0, 0) if request.device is None else request.device.capability
    # Kernels of 9.0 use instructions that later devices do not have.
    return "fa3" if capability == FA3_CAPABILITY else "fa2"


def is_compiled(request: AttentionRequest) -> bool:
    """Return whether there is a module for such layers."""
    kind, size = SHORT_NAMES.get(request.dtype, ""), request.head_size
    ending = "_sm90" if kernels_for(request, "") == "fa3" else "_f16qk_False"
    heads = f"dtype_q_{kind}_dtype_kv_{kind}_dtype_o_{kind}_dtype_idx_i32_head_dim_qk_{size}_head_dim_vo_{size}"
    masks = f"posenc_0_use_swa_{bool(request.window)}_use_logits_cap_{bool(request.softcap)}"
    return has_module(f"batch_prefill_with_kv_cache_{heads}_{masks}*{ending}")


def has_module(pattern: str) -> bool:
    """Return whether a compiled module of some name lies where FlashInfer looks for one: in the package or the cache of
    the home folder (another one, named by a variable, is not looked at).
    """
    spec = find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        return False
    ahead = Path(spec.submodule_search_locations[0]) / "data" / "aot"
    kept = Path.home() / ".cache" / "flashinfer" / version(DISTRIBUTION)
    return any(ahead.glob(f"{pattern}/*.so")) or any(kept.glob(f"*/cached_ops/{pattern}/*.so"))


def can_compile() -> bool:
    """Return whether there is a CUDA compiler."""
    return shutil.which("nvcc") is not None or TOOLKIT.exists()
