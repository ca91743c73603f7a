"""Shapes of the attention kernels: chosen from head size, type and device, overruled by the plugin's options."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jackfield.interfaces import AttentionEnv
from jackfield_triton.launch import power_of_two

ROOMY = frozenset({(8, 0), (8, 7), (9, 0), (10, 0), (10, 3)})
"""Capabilities with 160 KB of shared memory or more for a program; others have about 100 KB."""
FEW_CORES = 108
"""Assumed where the platform does not say how many multiprocessors there are."""
PROGRAMS_PER_CORE = 2
"""Decode programs wanted for each multiprocessor. Measured on an H200 with eight cache heads: 64 sequences of 1,024
tokens take 74 us with one split of the keys and 80 us with two; one of 4,096 takes 13 us with 16, 14 us with 32, and
19 us with 64.
"""
SHORT_ROWS = 64
"""Most rows (new tokens times heads of a group) of a query that the decode kernel takes."""
MOST_SPLITS = 64
DEPTH = 5
"""Pipeline stages. Pages are looked up before their keys can be asked for, which takes stages: with five, two tiles of
keys are on their way while one is used; with three or four only one is.
"""


@dataclass(frozen=True, slots=True)
class KernelShape:
    """Rows of queries, keys in a tile, warps, and tiles in flight. ``rows`` 0: the kernel's own."""

    rows: int
    tile: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How a batch of short queries is launched.

    Args:
        query: bound of new tokens of a sequence. rows: padded rows of a program. splits: parts of the keys.
    """

    query: int
    rows: int
    splits: int


def group_of(env: AttentionEnv) -> int:
    """Return how many query heads share a cache head on this rank."""
    return env.request.local_heads // env.request.local_kv_heads


def prefill_shape(env: AttentionEnv) -> KernelShape:
    """Return the shape of prefill. A tile always holds at least one token with all heads of its group."""
    wide, large = env.request.head_size > 128, roomy(env)
    if env.request.dtype == "float32":
        chosen = KernelShape(64 if large else 32, 16 if wide or not large else 32, 4, 2 if large and not wide else 1)
    elif not large:
        chosen = KernelShape(64, 32, 4, 2)
    else:
        chosen = KernelShape(64, 64, 4, 2) if wide else KernelShape(128, 64, 8, DEPTH)
    chosen = _overruled(env, "prefill", chosen)
    return replace(chosen, rows=max(chosen.rows, power_of_two(group_of(env))))


def decode_shape(env: AttentionEnv) -> KernelShape:
    """Return the shape of decode."""
    small = env.request.dtype == "float32" or not roomy(env) or env.request.head_size > 128
    return _overruled(env, "decode", KernelShape(0, 32, 4, 2) if small else KernelShape(0, 64, 4, DEPTH))


def decode_plan(env: AttentionEnv, sequences: int, max_query: int, max_length: int) -> DecodePlan:
    """Return the launch of ``sequences`` short queries.

    Args:
        env: of the builder. sequences: B. max_query: bound of new tokens of a sequence. max_length: the longest that
            any sequence may ever be (a limit of the engine, not of the step, so that graphs stay right).
    """
    query = power_of_two(max_query)
    rows = max(16, power_of_two(group_of(env) * query))
    wanted = int(_setting(env, "decode_splits"))
    if not wanted:
        programs = decode_programs(env) * 16 // rows
        wanted = programs // max(1, sequences * env.request.local_kv_heads)
    most = min(MOST_SPLITS, -(-max_length // decode_shape(env).tile))
    return DecodePlan(query, rows, max(1, min(wanted, most)))


def decode_programs(env: AttentionEnv) -> int:
    """Return how many decode programs of 16 rows are wanted at once."""
    device = env.request.device
    cores = device.cores if device is not None and device.cores > 1 else FEW_CORES
    return cores * PROGRAMS_PER_CORE


def roomy(env: AttentionEnv) -> bool:
    """Return whether multiprocessors of the device have room for large tiles."""
    device = env.request.device
    return device is None or device.capability in ROOMY


def _overruled(env: AttentionEnv, phase: str, chosen: KernelShape) -> KernelShape:
    names = ("rows", "tile", "warps", "stages")
    return KernelShape(*(int(_setting(env, f"{phase}_{name}")) or getattr(chosen, name) for name in names))


def _setting(env: AttentionEnv, name: str) -> int:
    return int(env.settings.values.get(name) or 0)
