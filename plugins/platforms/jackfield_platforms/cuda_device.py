"""Streams and graphs of a bound CUDA device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


class CudaStreams:
    """Implements :class:`jackfield.interfaces.StreamApi`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self) -> torch.cuda.Stream:
        """See StreamApi."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def use(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """See StreamApi."""
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """See StreamApi."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """See StreamApi."""
        stream.wait_event(event)

    def synchronize(self, event: torch.cuda.Event) -> None:
        """See StreamApi."""
        event.synchronize()


class CudaGraphs:
    """Implements :class:`jackfield.interfaces.GraphApi`. Work must have run once before it is recorded: kernels that
    load or compile in a recording break it. The current stream must not be the default one.
    """

    def begin(self, pool: Any) -> torch.cuda.CUDAGraph:
        """See GraphApi. Other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        return graph

    def end(self, graph: torch.cuda.CUDAGraph) -> None:
        """See GraphApi."""
        graph.capture_end()

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """See GraphApi."""
        graph.replay()

    def new_pool(self) -> Any:
        """See GraphApi."""
        return torch.cuda.graph_pool_handle()
