"""The light half: what the backends can do. Nothing here imports torch."""

from collections.abc import Sequence
from typing import Any

from jackfield.interfaces import BLOCK, AttentionBackend, AttentionRequest, Band, CacheSpec, Plane, Preference


class Rocket(AttentionBackend):
    """Softmax attention, one sequence after another, over blocks with heads outside tokens."""

    name = "rocket"
    summary = "an example: plain torch, one sequence after another"
    kinds = frozenset({"full"})
    features = frozenset({"prefill", "chunked_prefill", "decode", "mixed", "gqa"})
    dtypes = frozenset({"float32", "bfloat16", "float16"})
    heads_first = True

    @classmethod
    def preference(cls, request: AttentionRequest) -> Preference:
        return Preference(Band.FALLBACK, "an example")

    @classmethod
    def cache_specs(cls, request: AttentionRequest) -> Sequence[CacheSpec]:
        if request.cache_dtype not in ("", request.dtype):
            return []
        heads, size = request.local_kv_heads, request.head_size
        shape, shard = ((heads, BLOCK, size), 0) if cls.heads_first else ((BLOCK, heads, size), 1)
        return [CacheSpec(tuple(Plane(name, request.dtype, shape, shard_dim=shard) for name in "kv"))]

    @classmethod
    def metadata_builder(cls, env: Any) -> Any:
        from acme_rocket.layer import RocketBuilder

        return RocketBuilder(env)

    @classmethod
    def layer(cls, env: Any, index: int) -> Any:
        from acme_rocket.layer import RocketLayer

        return RocketLayer(env, cls.heads_first)


class RocketRows(Rocket):
    """The same over blocks with tokens outside heads."""

    name = "rocket_rows"
    heads_first = False
