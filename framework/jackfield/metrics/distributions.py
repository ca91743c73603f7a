"""How times and sizes of requests are distributed. A completion is one of the ``n`` sequences of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jackfield.metrics.histogram import COUNTS, SECONDS, Histogram, HistogramData
from jackfield.protocol import CoreEvent, EngineCoreOutput

BOUNDS: Mapping[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": SECONDS,
    "inter_token_latency_seconds": SECONDS,
    "request_time_per_output_token_seconds": SECONDS,
    "e2e_request_latency_seconds": SECONDS,
    "request_queue_time_seconds": SECONDS,
    "request_prefill_time_seconds": SECONDS,
    "request_decode_time_seconds": SECONDS,
    "request_prompt_tokens": COUNTS,
    "request_generation_tokens": COUNTS,
    "iteration_tokens_total": COUNTS,
}
"""Names of the histograms, and their bounds."""


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What counts of a request that is over. Times are of a monotonic clock, None without a token; ``scheduled`` is
    when it first got a place in a step, None when that is not known.
    """

    reason: str
    prompt_tokens: int
    cached_tokens: int
    arrival: float
    first_token: float | None
    last_token: float | None
    scheduled: float | None = None


@dataclass(slots=True)
class _Sequence:
    """A completion under way: when its first and its latest tokens came, and how many."""

    first: float
    last: float
    tokens: int


def empty() -> dict[str, HistogramData]:
    """Return the histograms before anything was counted."""
    return {name: Histogram(bounds).data() for name, bounds in BOUNDS.items()}


class Distributions:
    """Fills the histograms of :data:`BOUNDS`; without ``per_token`` not those of single completions."""

    def __init__(self, *, per_token: bool = True) -> None:
        self._per_token = per_token
        self._histograms = {name: Histogram(bounds) for name, bounds in BOUNDS.items()}
        self._sequences: dict[str, _Sequence] = {}

    def step(self, output: EngineCoreOutput, now: float) -> None:
        """Count a step that was told at ``now``, in seconds of the clock of :class:`FinishedRequest`."""
        if output.tokens:
            self._observe("iteration_tokens_total", output.tokens)
        for event in output.events if self._per_token else ():
            if event.token_ids:
                self._tokens(event, now)
            if event.finish is not None:
                self._end(event.request_id)

    def finish(self, request: FinishedRequest) -> None:
        """Count a request that is over."""
        self._observe("request_prompt_tokens", request.prompt_tokens)
        if request.scheduled is not None:
            self._observe("request_queue_time_seconds", request.scheduled - request.arrival)
        if request.first_token is None or request.last_token is None:
            return
        self._observe("time_to_first_token_seconds", request.first_token - request.arrival)
        self._observe("e2e_request_latency_seconds", request.last_token - request.arrival)
        self._observe("request_decode_time_seconds", request.last_token - request.first_token)
        if request.scheduled is not None:
            self._observe("request_prefill_time_seconds", request.first_token - request.scheduled)

    def data(self) -> dict[str, HistogramData]:
        """Return all histograms."""
        return {name: histogram.data() for name, histogram in self._histograms.items()}

    def _tokens(self, event: CoreEvent, now: float) -> None:
        sequence = self._sequences.get(event.request_id)
        if sequence is None:
            self._sequences[event.request_id] = _Sequence(now, now, len(event.token_ids))
            return
        self._observe("inter_token_latency_seconds", now - sequence.last)
        sequence.last = now
        sequence.tokens += len(event.token_ids)

    def _end(self, name: str) -> None:
        sequence = self._sequences.pop(name, None)
        self._observe("request_generation_tokens", sequence.tokens if sequence else 0)
        if sequence is not None and sequence.tokens > 1:
            each = (sequence.last - sequence.first) / (sequence.tokens - 1)
            self._observe("request_time_per_output_token_seconds", each)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)
