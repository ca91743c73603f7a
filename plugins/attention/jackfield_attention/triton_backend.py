"""``triton``: paged attention in Triton kernels; split-key decode, tiled prefill, both in one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import (
    BLOCK,
    AttentionBackend,
    AttentionEnv,
    AttentionRequest,
    Band,
    CacheSpec,
    GraphSupport,
    HostLengths,
    MetadataBuilder,
    Option,
    Plane,
    Preference,
    Reason,
)
from jackfield_attention.cache_types import FLOATS
from jackfield_attention.triton_tuning import SHORT_ROWS
from jackfield_triton.launch import capability_reasons

if TYPE_CHECKING:
    from jackfield_attention.triton_layer import TritonLayer

LARGEST_HEAD = 256
NARROW = frozenset(FLOATS)
NARROW_CAPABILITY = (8, 9)
LARGEST_GROUP = 64
"""Query heads that may share a cache head: the rows of one tile."""


class TritonBackend(AttentionBackend):
    """Flash attention over pages. Needs nothing but Triton."""

    name = "triton"
    summary = "paged attention in Triton: split-key decode, tiled prefill"
    kinds: ClassVar[frozenset[str]] = frozenset({"full", "sliding", "chunked_local"})
    features: ClassVar[frozenset[str]] = frozenset(
        {"prefill", "chunked_prefill", "decode", "mixed", "gqa", "softcap", "sinks", "cache_scales", "tree"}
    )
    dtypes: ClassVar[frozenset[str]] = frozenset({"bfloat16", "float16", "float32"})
    device_types: ClassVar[frozenset[str]] = frozenset({"cuda"})
    requires: ClassVar[tuple[str, ...]] = ("triton>=3.2",)
    options: ClassVar[Mapping[str, Option]] = {
        "pdl": Option(bool, True, "start kernels while the ones before them drain, from capability 9.0 on"),
        "decode_splits": Option(int, 0, "parts that the keys of a decoding sequence are split into; 0: by batch size"),
        "decode_tile": Option(int, 0, "keys in a tile of decode; 0: chosen", (0, 16, 32, 64, 128)),
        "decode_warps": Option(int, 0, "warps of a decode program; 0: chosen", (0, 1, 2, 4, 8)),
        "decode_stages": Option(int, 0, "tiles in flight in decode; 0: chosen", (0, 1, 2, 3, 4, 5)),
        "prefill_rows": Option(int, 0, "query rows in a tile of prefill; 0: chosen", (0, 64, 128, 256)),
        "prefill_tile": Option(int, 0, "keys in a tile of prefill; 0: chosen", (0, 16, 32, 64, 128)),
        "prefill_warps": Option(int, 0, "warps of a prefill program; 0: chosen", (0, 4, 8, 16)),
        "prefill_stages": Option(int, 0, "tiles in flight in prefill; 0: chosen", (0, 1, 2, 3, 4, 5)),
    }
    graph_support: ClassVar[GraphSupport] = GraphSupport.UNIFORM
    host_lengths: ClassVar[HostLengths] = HostLengths.UPPER_BOUND
    prepares: ClassVar[bool] = True
    narrow: ClassVar[frozenset[str]] = NARROW
    """Types that a cache may have besides the computation's."""

    @classmethod
    def check(cls, request: AttentionRequest) -> Sequence[Reason]:
        """Reject old devices, caches of another type, and head sizes past 256 or unlike for keys and values."""
        return tuple(_limits(request, cls.narrow))

    @classmethod
    def recorded_query(cls, request: AttentionRequest) -> int:
        """Return how many tokens the decode kernel takes: longer queries are cut into tiles by the host."""
        return max(1, SHORT_ROWS // (request.local_heads // request.local_kv_heads))

    @classmethod
    def preference(cls, request: AttentionRequest) -> Preference:
        """Return GOOD."""
        return Preference(Band.GOOD, "Triton kernels over pages")

    @classmethod
    def cache_specs(cls, request: AttentionRequest) -> Sequence[CacheSpec]:
        """Return heads outside tokens first (a block's head is contiguous), then tokens outside heads."""
        heads, size, dtype = request.local_kv_heads, request.head_size, request.cache_dtype or request.dtype
        by_head = tuple(Plane(name, dtype, (heads, BLOCK, size), shard_dim=0) for name in ("k", "v"))
        by_token = tuple(Plane(name, dtype, (BLOCK, heads, size), shard_dim=1) for name in ("k", "v"))
        return [CacheSpec(planes, window=request.window) for planes in (by_head, by_token)]

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> MetadataBuilder:
        """See AttentionBackend."""
        from jackfield_attention.triton_metadata import TritonMetadataBuilder

        return TritonMetadataBuilder(env)

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> TritonLayer:
        """See AttentionBackend."""
        from jackfield_attention.triton_layer import TritonLayer

        return TritonLayer(env)


def _limits(request: AttentionRequest, narrow: frozenset[str]) -> list[Reason]:
    found, size = capability_reasons(request.device), request.head_size
    if not 16 <= size <= LARGEST_HEAD:
        found.append(Reason("head_size", "head_size", f"{size} is not between 16 and {LARGEST_HEAD}"))
    if request.value_head_size not in (0, size):
        detail = f"{request.value_head_size} differs from the key's {size}"
        found.append(Reason("value_head_size", "value_head_size", detail))
    if request.cache_dtype not in ("", request.dtype, *narrow):
        detail = f"{request.cache_dtype} differs from the computation type {request.dtype}"
        remedy = f"set cache.cache_dtype to one of: {', '.join((request.dtype, *sorted(narrow)))}"
        found.append(Reason("cache_dtype", "cache_dtype", detail, remedy))
    else:
        found += narrow_reasons(request)
    if request.local_heads > LARGEST_GROUP * request.local_kv_heads:
        detail = f"{request.local_heads} query heads on {request.local_kv_heads} cache heads are more than 64 to one"
        found.append(Reason("group", "num_heads", detail))
    return found


def narrow_reasons(request: AttentionRequest) -> list[Reason]:
    """Return reasons against a cache of 8-bit floats on the request's device."""
    device = request.device
    if request.cache_dtype not in NARROW or device is None or not (0, 0) < device.capability < NARROW_CAPABILITY:
        return []
    version = ".".join(map(str, device.capability))
    return [Reason("cache_dtype", "cache_dtype", f"8-bit floats need capability 8.9, not {version}")]
