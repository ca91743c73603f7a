"""One rank: holds the model, the cache and the per-slot tables, and runs planned steps."""

from jackfield.worker.build import WorkerSpec
from jackfield.worker.worker import Worker

__all__ = ["Worker", "WorkerSpec"]
