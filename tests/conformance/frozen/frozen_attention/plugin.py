"""The light half: what the backend can do. Nothing here imports torch."""

from collections.abc import Sequence
from typing import Any

from jackfield.interfaces import (
    BLOCK,
    AttentionBackend,
    AttentionEnv,
    AttentionRequest,
    Band,
    CacheSpec,
    Plane,
    Preference,
    Reason,
)


class FrozenAttention(AttentionBackend):
    """Softmax attention over blocks of keys and values, one sequence after another."""

    name = "frozen_attention"
    api = (1, 0)
    summary = "Frozen attention: plain torch, one sequence after another"
    kinds = frozenset({"full"})
    features = frozenset({"prefill", "chunked_prefill", "decode", "mixed", "gqa"})
    dtypes = frozenset({"float32", "bfloat16", "float16"})

    @classmethod
    def check(cls, request: AttentionRequest) -> Sequence[Reason]:
        if request.cache_dtype in ("", request.dtype):
            return []
        return [Reason("cache_dtype", "cache_dtype", f"{request.cache_dtype} is not {request.dtype}")]

    @classmethod
    def preference(cls, request: AttentionRequest) -> Preference:
        return Preference(Band.FALLBACK, "a start, not tuned for any device")

    @classmethod
    def cache_specs(cls, request: AttentionRequest) -> Sequence[CacheSpec]:
        shape = (BLOCK, request.local_kv_heads, request.head_size)
        return [CacheSpec(tuple(Plane(name, request.dtype, shape, shard_dim=1) for name in "kv"))]

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> Any:
        from frozen_attention.layer import Builder

        return Builder()

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> Any:
        from frozen_attention.layer import Layer

        return Layer(env)
