"""What backends with states have in common, without torch."""

from __future__ import annotations

from collections.abc import Sequence

from jackfield.interfaces import AttentionRequest, Band, CacheSpec, Plane, Preference, Reason


def state_spec(request: AttentionRequest, *states: Plane) -> CacheSpec:
    """Return the layout of a layer with states: what its short convolution keeps (``extra["conv_shards"]``, a tuple of
    OutputShard, and ``extra["conv_width"]``; none without them), and ``states``.
    """
    shards = request.extra.get("conv_shards", ())
    if not shards:
        return CacheSpec(states, per="sequence")
    channels = sum(shard.local_size(request.rank) for shard in shards)
    conv = Plane("conv", request.dtype, (channels, request.extra["conv_width"] - 1), shard_dim=0)
    return CacheSpec((conv, *states), per="sequence")


def state_reasons(request: AttentionRequest) -> Sequence[Reason]:
    """Return reasons against a layer whose states would have to be stored in another type than they are."""
    if request.cache_dtype in ("", request.dtype):
        return []
    detail = f"{request.cache_dtype} is no type for states: they are float32, and what convolutions keep is as computed"
    return [Reason("cache_dtype", "cache_dtype", detail, "leave cache.cache_dtype out")]


def reference_preference(request: AttentionRequest) -> Preference:
    """Return SUPPORTED on a CPU, where torch's kernels are the tuned ones, else FALLBACK."""
    if request.device is not None and request.device.type == "cpu":
        return Preference(Band.SUPPORTED, "torch's CPU kernels")
    return Preference(Band.FALLBACK, "reference")
