"""One worker in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jackfield.kv_cache import CachePlan
from jackfield.protocol import ModelRunnerOutput, SchedulerOutput
from jackfield.worker import Worker, WorkerSpec


@dataclass(slots=True)
class Done:
    """A step that ran to its end when it was launched."""

    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        """Return the result."""
        return self.output


class InProcessExecutor:
    """Runs one rank in the calling thread."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.worker = Worker(spec)

    def start(self, progress: Callable[[int, int], None] | None = None) -> CachePlan:
        """See Executor."""
        return self.worker.start(progress)

    def launch(self, plan: SchedulerOutput) -> Done:
        """See Executor."""
        return Done(self.worker.execute(plan))

    def shutdown(self) -> None:
        """See Executor. The worker dies with this object."""
