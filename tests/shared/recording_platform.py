"""A device that records, on a CPU: graphs of torch ops, streams that only count, and the platform that offers both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jackfield.interfaces import RecordLimits
from jackfield_platforms.cpu import CpuPlatform

aten = torch.ops.aten
WAITING = (
    *(aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal),
    *(aten.nonzero, aten.masked_select, aten.unique_dim, aten._unique2),
)
"""Ops whose result, or its size, the host must wait for: a real device refuses to record them."""
UNWRITTEN = (aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided)
"""Ops whose results hold nothing yet; a replay fills them with NaN, so that whoever reads them is found out."""


@dataclass(slots=True)
class Call:
    """One recorded op and the tensors that it made."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[torch.Tensor]


class Graph(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no annotations
    """Records while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._check(func, args)
        result = func(*args, **(kwargs or {}))
        results = _tensors(result)
        # A view stays a view of the same memory: to take it again would change nothing.
        if not (func.is_view and all(_memory(tensor) == _memory(args[0]) for tensor in results)):
            self.calls.append(Call(func, args, kwargs or {}, results))
        return result

    def replay(self) -> None:
        """Run everything again, into the same tensors."""
        self.replays += 1
        for call in self.calls:
            if call.func.overloadpacket in UNWRITTEN:  # type: ignore[attr-defined]  # every dispatched op has one
                for tensor in call.results:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
                continue
            for tensor, new in zip(call.results, _tensors(call.func(*call.args, **call.kwargs)), strict=True):
                # Results of in-place ops are where they should be already.
                if _memory(new) != _memory(tensor):
                    tensor.copy_(new)

    def _check(self, func: Any, args: Any) -> None:
        assert func.overloadpacket not in WAITING, f"{func} makes the host wait: it cannot be recorded"
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            masks = [a for a in tree_leaves(args[1:]) if isinstance(a, torch.Tensor) and a.dtype is torch.bool]
            assert not masks, f"{func} with a mask has a size that depends on data: it cannot be recorded"


class Graphs:
    """Implements :class:`jackfield.interfaces.GraphApi`."""

    def __init__(self) -> None:
        self.all: list[Graph] = []
        self.open: Graph | None = None

    def new_pool(self) -> Any:
        return object()

    def begin(self, pool: Any) -> Graph:
        assert self.open is None, "one recording at a time"
        self.open = Graph()
        self.open.__enter__()  # type: ignore[no-untyped-call]
        return self.open

    def end(self, graph: Graph) -> None:
        assert self.open is graph
        graph.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.open = None
        self.all.append(graph)

    def replay(self, graph: Graph) -> None:
        assert self.open is None, "no replay while recording"
        graph.replay()

    @property
    def replays(self) -> int:
        """Replays of all graphs together."""
        return sum(graph.replays for graph in self.all)


@dataclass
class Streams:
    """Implements :class:`jackfield.interfaces.StreamApi`: work is over at once, and events count."""

    recorded: int = 0
    waited: list[int] = field(default_factory=list)

    def new_stream(self) -> object:
        return object()

    def use(self, stream: object) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self, stream: object) -> int:
        self.recorded += 1
        return self.recorded

    def wait(self, stream: object, event: int) -> None:
        assert 0 < event <= self.recorded

    def synchronize(self, event: int) -> None:
        assert 0 < event <= self.recorded
        self.waited.append(event)


class RecordingPlatform(CpuPlatform):
    """The CPU, as an asynchronous device with graphs."""

    name = "recording"
    summary = "a processor that records"
    asynchronous: ClassVar[bool] = True
    records: ClassVar[RecordLimits] = RecordLimits()
    is_fallback: ClassVar[bool] = False

    def __init__(self) -> None:
        self.graphs, self.streams = Graphs(), Streams()

    def stream_api(self) -> Streams:
        return self.streams

    def graph_api(self) -> Graphs:
        return self.graphs


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
