"""Scheduling policies: only an order. A policy cannot change how steps are planned, so it cannot cost overlap."""

from __future__ import annotations

from typing import Protocol

from jackfield.protocol import EngineCoreRequest


class SchedulingPolicy(Protocol):
    """Orders requests; the smallest key is admitted first, the largest is preempted first."""

    def key(self, request: EngineCoreRequest) -> tuple[int, ...]:
        """Return the sort key of a request. Must not change while the request lives."""
        ...


class FcfsPolicy:
    """First come, first served."""

    def key(self, request: EngineCoreRequest) -> tuple[int, ...]:
        """Return the arrival number."""
        return (request.arrival,)


class PriorityPolicy:
    """Smaller ``priority`` first, then arrival."""

    def key(self, request: EngineCoreRequest) -> tuple[int, ...]:
        """Return (priority, arrival)."""
        return (request.priority, request.arrival)


POLICIES: dict[str, type[FcfsPolicy] | type[PriorityPolicy]] = {"fcfs": FcfsPolicy, "priority": PriorityPolicy}
