"""Types that torch backends can store keys and values in, and the planes that follow. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from jackfield.interfaces import BLOCK, AttentionRequest, Plane, Reason

FLOATS = ("float8_e4m3fn", "float8_e5m2")
"""Stored as they are, without scales: what is too large becomes the largest number."""
INTEGERS = {"int8": 1, "int4": 2}
"""Stored with a float32 scale for each token and head; numbers in a byte."""


def store_reasons(request: AttentionRequest, sizes: Sequence[int]) -> list[Reason]:
    """Return reasons against the request's storage type for vectors of these sizes."""
    kind = request.cache_dtype
    if kind in ("", request.dtype) or kind in FLOATS:
        return []
    if kind not in INTEGERS:
        known = ", ".join((request.dtype, *FLOATS, *INTEGERS))
        detail = f"{kind} is no type that keys and values can be stored in here"
        return [Reason("cache_dtype", "cache_dtype", detail, f"use one of: {known}")]
    odd = [size for size in sizes if size % INTEGERS[kind]]
    if odd:
        detail = f"{kind} packs {INTEGERS[kind]} numbers in a byte, and {odd[0]} cannot be packed so"
        return [Reason("cache_dtype", "cache_dtype", detail, "use int8")]
    return []


def store_planes(request: AttentionRequest, name: str, heads: int, size: int, shard: int | None = 0) -> list[Plane]:
    """Return the planes of vectors of ``size`` per token and head, heads outside tokens."""
    kind = request.cache_dtype or request.dtype
    if kind not in INTEGERS:
        return [Plane(name, kind, (heads, BLOCK, size), shard_dim=shard)]
    values = Plane(name, "uint8" if kind == "int4" else "int8", (heads, BLOCK, size // INTEGERS[kind]), shard_dim=shard)
    return [values, Plane(f"{name}_scale", "float32", (heads, BLOCK), shard_dim=shard)]
