"""``fcfs`` and ``priority``: the two orders that users of the field know."""

from __future__ import annotations

from jackfield.interfaces import Band, Preference, RequestView, SchedulingPolicy, SchedulingRequest


class Fcfs(SchedulingPolicy):
    """First come, first served."""

    name = "fcfs"
    summary = "first come, first served"

    @classmethod
    def preference(cls, request: SchedulingRequest) -> Preference:
        """Return GOOD: no request can starve."""
        return Preference(Band.GOOD, "no request can starve")

    def key(self, request: RequestView) -> tuple[float, ...]:
        """Return the arrival number."""
        return (request.arrival,)


class Priority(SchedulingPolicy):
    """Smaller ``priority`` first, then arrival."""

    name = "priority"
    summary = "smaller priority numbers first, then first come, first served"

    @classmethod
    def preference(cls, request: SchedulingRequest) -> Preference:
        """Return SUPPORTED: a stream of urgent requests can starve others."""
        return Preference(Band.SUPPORTED, "urgent requests go first, others may wait")

    def key(self, request: RequestView) -> tuple[float, ...]:
        """Return (priority, arrival)."""
        return (request.priority, request.arrival)
