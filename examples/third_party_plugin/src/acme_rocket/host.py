"""A device world. This one drives the host's processor through torch, under another name: replace what is different
on your devices. It is used only where it is named (``opt_in``); a real platform leaves that line out.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
)

if TYPE_CHECKING:
    import torch


class RocketHost(Platform):
    """The host's processor."""

    name = "rocket_host"
    summary = "an example: the host's processor"
    device_type = "cpu"
    opt_in = True

    @classmethod
    def probe(cls) -> Probe:
        """Say what is there. Make no device context here, and set no environment variable."""
        return Probe(True, f"{os.cpu_count()} cores", 1)

    @classmethod
    def facts(cls, index: int) -> DeviceFacts:
        memory, cores = _bytes("SC_PHYS_PAGES"), os.cpu_count() or 1
        return DeviceFacts("cpu", "an example", index, memory_bytes=memory, cores=cores)

    @classmethod
    def preference(cls, request: PlatformRequest) -> Preference:
        return Preference(Band.FALLBACK, "the host's processor")

    @classmethod
    def proposals(cls, config: ConfigView, facts: DeviceFacts) -> Sequence[Proposal]:
        return (
            Proposal("model.dtype", "float32", False, "narrower types are slower here"),
            Proposal("cache.kv_cache_memory", min(1 << 30, facts.memory_bytes // 8), False, "leaves room for others"),
        )

    @classmethod
    def bind(cls, rank: int, config: ConfigView) -> "RocketHost":
        return cls()

    @property
    def device(self) -> "torch.device":
        import torch

        return torch.device("cpu")

    def memory(self) -> DeviceMemory:
        return DeviceMemory(_bytes("SC_PHYS_PAGES"), _bytes("SC_AVPHYS_PAGES"))


def _bytes(pages: str) -> int:
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
