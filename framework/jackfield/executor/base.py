"""The executor interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from jackfield.kv_cache import CachePlan
from jackfield.protocol import ModelRunnerOutput, Recordings, SchedulerOutput


class Pending(Protocol):
    """A step that was launched."""

    leads: bool
    """Whether another round of its sequences may be launched before the result is known."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its result."""
        ...


class Executor(Protocol):
    """Runs planned steps on all ranks, in the order in which they are launched."""

    def start(self, progress: Callable[[int, int], None] | None = None) -> CachePlan:
        """Bring up the workers; returns the cache plan that all agreed on."""
        ...

    def recordings(self) -> Recordings:
        """Return what was recorded of rounds of speculation, once started."""
        ...

    def launch(self, plan: SchedulerOutput) -> Pending:
        """Start a step."""
        ...

    def shutdown(self) -> None:
        """Stop the workers and free what they hold."""
        ...
