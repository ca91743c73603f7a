"""Platform: which world of devices this is, and what it offers. Family ``platforms``, entry-point group
``jackfield.platforms.v1``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jackfield.interfaces.facts import DeviceFacts
from jackfield.interfaces.plugin import Plugin, Proposal, Request
from jackfield.interfaces.views import ConfigView

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Probe:
    """The answer to "does this platform exist here?".

    Args:
        present: whether devices of this platform can be used.
        detail: what was seen, for the report (``2 devices``, ``no driver found``).
        device_count: number of devices.
    """

    present: bool
    detail: str
    device_count: int = 0


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device, as the platform counts them."""

    total: int
    free: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlatformRequest(Request):
    """Asks for the device world of a process. ``kind`` is always ``devices``."""


class Communicator(Protocol):
    """Collectives over one parallel group. All calls are made by every rank of the group, in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks; may reuse ``tensor``."""
        ...

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the ranks' tensors concatenated along ``dim``."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Return rank ``source``'s tensor on every rank; writes into ``tensor``."""
        ...


class StreamApi(Protocol):
    """Streams and events of a device that runs asynchronously. A platform without them runs every step to its end."""

    def new_stream(self) -> Any:
        """Return a new stream."""
        ...

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context inside which work goes to ``stream``."""
        ...

    def record(self, stream: Any) -> Any:
        """Return an event recorded at the end of what ``stream`` holds now."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Make ``stream`` wait for ``event``."""
        ...

    def synchronize(self, event: Any) -> None:
        """Block the host until ``event`` has happened."""
        ...


@dataclass(frozen=True, slots=True)
class RecordLimits:
    """What a platform gains by recorded steps.

    Args:
        sequences: most of a recorded decode step; None: as many as run. tokens: most of a step of any mix, which is
            recorded in pieces; None: as many as a step has. ahead: all sizes are recorded before the first request, so
            that none waits; else each when it is first met, but for the smallest. Asynchronous platforms record ahead.
    """

    sequences: int | None = None
    tokens: int | None = None
    ahead: bool = True


class NotRecorded(Exception):
    """Raised out of work that is being recorded and cannot be, with the reason; steps are launched op by op then."""


class GraphApi(Protocol):
    """Recording and replaying of device work. Work must have run once before it is recorded."""

    def begin(self, pool: Any) -> Any:
        """Start recording what is queued on the current stream, with memory from ``pool``; returns the graph."""
        ...

    def end(self, graph: Any) -> None:
        """Stop recording; the graph can be replayed from now on."""
        ...

    def replay(self, graph: Any) -> None:
        """Queue a recorded graph on the current stream."""
        ...

    def new_pool(self) -> Any:
        """Return a memory pool that graphs may share, as long as they are replayed in the order of their recording."""
        ...


class Platform(Plugin):
    """A device world: CPU, one vendor's accelerators, a simulator.

    Class methods answer questions before any device context exists; an instance is made once per worker by
    :meth:`bind`.
    """

    family: ClassVar[str] = "platforms"
    kinds: ClassVar[frozenset[str]] = frozenset({"devices"})
    device_type: ClassVar[str] = ""
    """torch's device type string."""
    asynchronous: ClassVar[bool] = False
    """Whether work is queued on streams, so that the host can plan a step while another runs."""
    records: ClassVar[RecordLimits] = RecordLimits()
    """Of recorded steps, where there is a graph interface."""
    is_fallback: ClassVar[bool] = False
    """True for the generic platform that is always present: it is not taken silently when a better platform failed
    to load or to probe.
    """

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Say whether this platform is present. Must not create a device context, set environment variables or
        register anything.
        """

    @classmethod
    @abstractmethod
    def facts(cls, index: int) -> DeviceFacts:
        """Return the facts of device ``index``, without a device context."""

    @classmethod
    def proposals(cls, config: ConfigView, facts: DeviceFacts) -> Sequence[Proposal]:
        """Return limits and defaults for this device, as data. They are recorded in the report; a user's value is
        never changed.
        """
        return ()

    @classmethod
    def worker_env(cls, rank: int) -> Mapping[str, str]:
        """Return environment variables that a worker process of ``rank`` must be started with."""
        return {}

    @classmethod
    @abstractmethod
    def bind(cls, rank: int, config: ConfigView) -> Platform:
        """Take possession of the device of ``rank`` in this process (context, threads) and return the platform
        object.
        """

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of this worker."""

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Return total and free bytes of the bound device now."""

    def synchronize(self) -> None:
        """Wait until the device has finished all work. Nothing to do where work is synchronous."""

    def empty_cache(self) -> None:
        """Give unused memory of the framework's allocator back to the device."""

    def stream_api(self) -> StreamApi | None:
        """Return the stream interface, or None where work is synchronous."""
        return None

    def graph_api(self) -> GraphApi | None:
        """Return the graph interface, or None."""
        return None

    def communicator(self, group: Any) -> Communicator | None:
        """Return collectives of this platform for a ``torch.distributed`` group, or None to use torch's own."""
        return None
