"""The CPU platform: always present, synchronous, and no special case anywhere else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import (
    Band,
    ConfigView,
    DeviceFacts,
    DeviceMemory,
    Platform,
    PlatformRequest,
    Preference,
    Probe,
    Proposal,
    RecordLimits,
)

if TYPE_CHECKING:
    import torch

    from jackfield_platforms.cpu_graphs import CpuGraphs

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
MOST_RECORDED = 8
"""Sequences of a recorded step. With more of them the work itself is what takes time, and all that a step makes is kept
for each size.
"""


class CpuPlatform(Platform):
    """The host's processors through torch."""

    name = "cpu"
    summary = "any processor that torch runs on"
    device_type: ClassVar[str] = "cpu"
    is_fallback: ClassVar[bool] = True
    records: ClassVar[RecordLimits] = RecordLimits(sequences=MOST_RECORDED, tokens=0, ahead=False)

    @classmethod
    def probe(cls) -> Probe:
        """See Platform."""
        return Probe(True, f"{_usable_cores()} cores", 1)

    @classmethod
    def facts(cls, index: int) -> DeviceFacts:
        """See Platform."""
        model, flags = _read_cpuinfo()
        return DeviceFacts(
            type="cpu",
            name=model,
            index=index,
            memory_bytes=_read_meminfo().get("MemTotal", 0),
            cores=_usable_cores(),
            features=flags,
        )

    @classmethod
    def preference(cls, request: PlatformRequest) -> Preference:
        """Return FALLBACK: where there is an accelerator it goes first."""
        return Preference(Band.FALLBACK, "always present")

    @classmethod
    def proposals(cls, config: ConfigView, facts: DeviceFacts) -> Sequence[Proposal]:
        """See Platform."""
        return (
            Proposal(
                "model.dtype", "float32", False, "matrix products of narrower types are slower on most processors"
            ),
            Proposal("cache.block_size", 32, False, "blocks are the unit of batched products in decode"),
            Proposal(
                "scheduler.max_num_seqs", 64, False, "more sequences at once do not raise a processor's throughput"
            ),
            Proposal(
                "cache.kv_cache_memory",
                _cache_budget(facts.memory_bytes),
                False,
                "leaves memory to the rest of the host",
            ),
            Proposal("scheduler.max_num_batched_tokens", 2048, False, "keeps a step under a few seconds"),
        )

    @classmethod
    def bind(cls, rank: int, config: ConfigView) -> CpuPlatform:
        """See Platform."""
        return cls()

    @property
    def device(self) -> torch.device:
        """See Platform."""
        import torch

        return torch.device("cpu")

    def graph_api(self) -> CpuGraphs:
        """See Platform."""
        from jackfield_platforms.cpu_graphs import CpuGraphs

        return CpuGraphs()

    def memory(self) -> DeviceMemory:
        """See Platform."""
        found = _read_meminfo()
        return DeviceMemory(found.get("MemTotal", 0), found.get("MemAvailable", 0))


def _cache_budget(total: int) -> int:
    """Return 4 GiB, or a quarter of a small machine's memory."""
    return max(1 << 26, min(4 << 30, total // 4))


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_cpuinfo() -> tuple[str, frozenset[str]]:
    """Return (model name, instruction-set flags); empty where the system has no /proc."""
    model, flags = "", frozenset[str]()
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and not model:
                model = value.strip()
            if key.strip() in ("flags", "Features") and not flags:
                flags = frozenset(value.split())
    return model, flags


def _read_meminfo() -> dict[str, int]:
    """Return bytes by name from /proc/meminfo, or totals from sysconf elsewhere."""
    if _MEMINFO.exists():
        rows = (line.split() for line in _MEMINFO.read_text().splitlines())
        return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"MemTotal": total, "MemAvailable": total // 2}
