"""Blocks of the KV cache: who owns them, which prefixes they hold, and what a memory budget buys."""

from jackfield.kv_cache.block_pool import BlockPool
from jackfield.kv_cache.groups import CacheGroup, Retention, retention_of, split_layers
from jackfield.kv_cache.hashing import BlockHasher
from jackfield.kv_cache.manager import KVCacheManager
from jackfield.kv_cache.planning import CachePlan, plan_cache

__all__ = [
    "BlockHasher",
    "BlockPool",
    "CacheGroup",
    "CachePlan",
    "KVCacheManager",
    "Retention",
    "plan_cache",
    "retention_of",
    "split_layers",
]
