"""Decides, step by step, which tokens of which sequences are computed."""

from jackfield.scheduler.policy import FcfsPolicy, PriorityPolicy, SchedulingPolicy
from jackfield.scheduler.scheduler import Scheduler, SchedulerLimits

__all__ = ["FcfsPolicy", "PriorityPolicy", "Scheduler", "SchedulerLimits", "SchedulingPolicy"]
