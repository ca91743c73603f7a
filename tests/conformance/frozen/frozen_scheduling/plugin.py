"""An order of requests, and nothing else: it cannot cost a token of anybody's output."""

from jackfield.interfaces import Band, Preference, RequestView, SchedulingPolicy, SchedulingRequest


class FrozenScheduling(SchedulingPolicy):
    """Short prompts first, then the order of arrival."""

    name = "frozen_scheduling"
    api = (1, 0)
    summary = "Frozen scheduling: short prompts first"

    @classmethod
    def preference(cls, request: SchedulingRequest) -> Preference:
        return Preference(Band.FALLBACK, "long prompts may wait")

    def key(self, request: RequestView) -> tuple[float, ...]:
        return (request.prompt_length, request.arrival)
