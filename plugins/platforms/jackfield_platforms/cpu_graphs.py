"""Recorded steps on processors: what torch and the kernels in C did once is done again, on the same tensors.

A decode step of few sequences is a few hundred short calls, and most of its time goes into the Python around them. A
recording keeps the calls alone. Views are made once, tensors that were made stay where they are, and results are copied
into them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from jackfield.interfaces import NotRecorded
from jackfield_native.library import loaded

READS = frozenset({"tolist", "numpy", "__array__", "item", "__bool__", "__int__", "__float__", "__index__"})
"""Methods of tensors that give Python their numbers."""
EMPTY = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})
"""Ops that leave anything in what they make."""
UNKNOWN_SIZES = frozenset(
    f"aten::{name}" for name in ("nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "repeat_interleave")
)
"""Ops whose results have as many elements as their numbers say."""

Call = Callable[[], Any]


class CpuGraph:
    """One recording.

    Raises:
        NotRecorded: out of work that reads numbers or makes tensors whose sizes depend on numbers.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._kept: list[Any] = []
        self._modes: list[Any] = [_Reads(), _Ops(self)]
        self._library = loaded()

    def begin(self) -> None:
        """Record what this thread does from now on."""
        if self._library is not None:
            self._library.keep(self.calls.append)
        for mode in self._modes:
            mode.__enter__()

    def end(self) -> None:
        """Stop."""
        while self._modes:
            self._modes.pop().__exit__(None, None, None)
        if self._library is not None:
            self._library.keep(None)
        elif loaded() is not None:
            raise NotRecorded("kernels were loaded meanwhile, whose calls were not seen")

    def replay(self) -> None:
        """Do everything again."""
        for call in self.calls:
            call()

    def add(self, op: Any, arguments: tuple[Any, ...], named: dict[str, Any], results: Any) -> None:
        """Keep a call of torch that was made, and its tensors."""
        self._kept.append((arguments, named, results))
        name = op._schema.name
        if name in UNKNOWN_SIZES or (name == "aten::index" and _chooses(arguments[1])):
            raise NotRecorded(f"the size of what {name} makes depends on numbers")
        if name in EMPTY:
            return
        if any(argument.alias_info is not None and argument.alias_info.is_write for argument in op._schema.arguments):
            self.calls.append(partial(op, *arguments, **named))
            return
        given = {_memory(tensor) for tensor in _tensors((arguments, named))}
        made = [tensor for tensor in _tensors(results) if _memory(tensor) not in given]
        if made:
            self.calls.append(partial(_again, op, arguments, named, results))


class CpuGraphs:
    """Implements :class:`jackfield.interfaces.GraphApi`."""

    def begin(self, pool: Any) -> CpuGraph:
        """See GraphApi."""
        graph = CpuGraph()
        graph.begin()
        return graph

    def end(self, graph: CpuGraph) -> None:
        """See GraphApi."""
        graph.end()

    def replay(self, graph: CpuGraph) -> None:
        """See GraphApi. Done when it returns."""
        graph.replay()

    def new_pool(self) -> None:
        """See GraphApi: recordings share nothing."""
        return None


class _Reads(TorchFunctionMode):
    """Refuses what would make Python depend on numbers."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in READS:
            raise NotRecorded(f"{function.__name__} gives Python numbers of a tensor")
        return function(*args, **(kwargs or {}))


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # a base class of torch's
    """Keeps what torch does."""

    def __init__(self, graph: CpuGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        if isinstance(results, bool | float) or function._schema.name == "aten::_local_scalar_dense":
            raise NotRecorded(f"{function._schema.name} gives Python numbers of a tensor")
        self._graph.add(function, args, kwargs or {}, results)
        return results


def _again(op: Any, arguments: tuple[Any, ...], named: dict[str, Any], results: Any) -> None:
    """Do an op again, and put what it makes where it was."""
    for old, new in zip(_tensors(results), _tensors(op(*arguments, **named)), strict=True):
        old.copy_(new)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors inside of tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _chooses(indices: Any) -> bool:
    """Return whether some of the indices say which elements are wanted, and not where they are."""
    return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(list(indices)))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
