"""Executors: where workers live. In this process now; several processes and Ray behind the same interface later."""

from jackfield.executor.base import Executor
from jackfield.executor.in_process import InProcessExecutor

__all__ = ["Executor", "InProcessExecutor"]
