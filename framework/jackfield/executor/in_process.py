"""One worker in this process."""

from __future__ import annotations

from collections.abc import Callable

from jackfield.kv_cache import CachePlan
from jackfield.protocol import Recordings, SchedulerOutput
from jackfield.worker import Worker, WorkerSpec
from jackfield.worker.pending import PendingStep


class InProcessExecutor:
    """Runs one rank in the calling thread."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.worker = Worker(spec)

    def start(self, progress: Callable[[int, int], None] | None = None) -> CachePlan:
        """See Executor."""
        return self.worker.start(progress)

    def recordings(self) -> Recordings:
        """See Executor."""
        return self.worker.recordings

    def launch(self, plan: SchedulerOutput) -> PendingStep:
        """See Executor."""
        return self.worker.launch(plan)

    def shutdown(self) -> None:
        """See Executor. The worker dies with this object."""
