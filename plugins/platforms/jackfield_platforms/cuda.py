"""The CUDA platform: devices of compute capability 8.0 and later, asked through NVML before any context exists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from jackfield.interfaces import (
    Band,
    ConfigView,
    DeviceFacts,
    DeviceMemory,
    GraphApi,
    Platform,
    PlatformRequest,
    Preference,
    Probe,
    Proposal,
    StreamApi,
)
from jackfield_platforms.cuda_nvml import probe_devices, read_facts

if TYPE_CHECKING:
    import torch


class CudaPlatform(Platform):
    """One CUDA device of this process."""

    name = "cuda"
    summary = "CUDA devices of compute capability 8.0 and later"
    device_type: ClassVar[str] = "cuda"
    asynchronous: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @classmethod
    def probe(cls) -> Probe:
        """See Platform."""
        return probe_devices()

    @classmethod
    def facts(cls, index: int) -> DeviceFacts:
        """See Platform."""
        return read_facts(index)

    @classmethod
    def preference(cls, request: PlatformRequest) -> Preference:
        """Return GOOD: an accelerator goes before the processor."""
        return Preference(Band.GOOD, "an accelerator is present")

    @classmethod
    def proposals(cls, config: ConfigView, facts: DeviceFacts) -> Sequence[Proposal]:
        """See Platform."""
        return (
            Proposal("cache.block_size", 64, False, "a tile of keys of the attention kernels is one block"),
            Proposal("scheduler.max_num_seqs", 256, False, "decode batches of this size fill the device"),
            Proposal("scheduler.max_num_batched_tokens", 8192, False, "prefill of this size fills the device"),
        )

    @classmethod
    def bind(cls, rank: int, config: ConfigView) -> CudaPlatform:
        """See Platform."""
        import torch

        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return cls(device)

    @property
    def device(self) -> torch.device:
        """See Platform."""
        return self._device

    def memory(self) -> DeviceMemory:
        """See Platform."""
        import torch

        free, total = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(total, free)

    def synchronize(self) -> None:
        """See Platform."""
        import torch

        torch.cuda.synchronize(self._device)

    def empty_cache(self) -> None:
        """See Platform."""
        import torch

        torch.cuda.empty_cache()

    def stream_api(self) -> StreamApi:
        """See Platform."""
        from jackfield_platforms.cuda_device import CudaStreams

        return CudaStreams(self._device)

    def graph_api(self) -> GraphApi:
        """See Platform."""
        from jackfield_platforms.cuda_device import CudaGraphs

        return CudaGraphs()
