"""Decides, step by step, which tokens of which sequences are computed."""

from jackfield.scheduler.draft import SchedulerLimits
from jackfield.scheduler.scheduler import Scheduler

__all__ = ["Scheduler", "SchedulerLimits"]
