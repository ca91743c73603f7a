"""Totals of an engine, from what steps and finished requests tell. An error in here never stops serving."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jackfield.metrics.distributions import Distributions, FinishedRequest, empty
from jackfield.metrics.histogram import HistogramData
from jackfield.protocol import CoreCounters, EngineCoreOutput

__all__ = ["EngineMetrics", "FinishedRequest", "MetricsCollector"]

_logger = logging.getLogger("jackfield.metrics")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMetrics:
    """A snapshot. All but the gauges in the last line are totals since the engine started and only grow; times are in
    seconds.

    Args:
        finished: requests by finish reason (that of their first completion).
        prompt_tokens, cached_prompt_tokens: of finished requests; those that the prefix cache had at admission.
        generation_tokens: sampled so far, by all requests.
        prefix_queries, prefix_hits: tokens that were looked up in the prefix cache and found, counted again when a
            preempted request comes back.
        preemptions: how often a running request lost its place.
        drafts_proposed, drafts_accepted: draft tokens that were verified and kept. draft_rounds: how often drafts of a
            sequence were verified. accepted_per_position: drafts kept, by their place among the drafts of a round.
        first_tokens, first_token_seconds: finished requests that had a token, and the sum of their times to it.
        end_to_end_seconds: the sum of the times from arrival to last token, of the same requests.
        histograms: how times and sizes are distributed, by name
            (:data:`jackfield.metrics.distributions.BOUNDS`).
        running, waiting: requests now. free_blocks: of the KV cache, now. cache_usage: part of its blocks that hold
            something now, 0 to 1.
    """

    finished: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    draft_rounds: int = 0
    accepted_per_position: tuple[int, ...] = ()
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    end_to_end_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    cache_usage: float = 0.0
    histograms: Mapping[str, HistogramData] = field(default_factory=empty)

    @property
    def prefix_hit_rate(self) -> float:
        """Part of the looked-up tokens that were found; 0 before any."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Part of the verified drafts that were kept; 0 before any."""
        return self.drafts_accepted / self.drafts_proposed if self.drafts_proposed else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a verified round of drafts gives on average, the target's own included; 1 before any."""
        return 1.0 + self.drafts_accepted / self.draft_rounds if self.draft_rounds else 1.0


class MetricsCollector:
    """Counts. The first error of its own is logged and ends the counting.

    Args:
        free_blocks: of the KV cache, before the first request. per_token: fill the histograms of what lies between
            tokens.
    """

    def __init__(self, free_blocks: int = 0, *, per_token: bool = True) -> None:
        self._finished: Counter[str] = Counter()
        self._prompt = self._cached = self._generated = self._first_tokens = 0
        self._first_seconds = self._whole_seconds = 0.0
        self._core = CoreCounters()
        self._blocks = free_blocks
        self._gauges = (0, 0, free_blocks)
        self._distributions = Distributions(per_token=per_token)
        self._broken = False

    def step(self, output: EngineCoreOutput) -> None:
        """Count a step."""
        self._guard(lambda: self._count_step(output))

    def finish(self, request: FinishedRequest) -> None:
        """Count a request that is over."""
        self._guard(lambda: self._count_request(request))

    def now(self, running: int, waiting: int, free_blocks: int) -> None:
        """Say how things stand, between steps."""
        self._gauges = (running, waiting, free_blocks)

    def snapshot(self) -> EngineMetrics:
        """Return all numbers."""
        running, waiting, free_blocks = self._gauges
        return EngineMetrics(
            finished=dict(self._finished),
            prompt_tokens=self._prompt,
            cached_prompt_tokens=self._cached,
            generation_tokens=self._generated,
            prefix_queries=self._core.prefix_queries,
            prefix_hits=self._core.prefix_hits,
            preemptions=self._core.preemptions,
            drafts_proposed=self._core.drafts_proposed,
            drafts_accepted=self._core.drafts_accepted,
            draft_rounds=self._core.draft_rounds,
            accepted_per_position=tuple(self._core.accepted_per_position),
            first_tokens=self._first_tokens,
            first_token_seconds=self._first_seconds,
            end_to_end_seconds=self._whole_seconds,
            running=running,
            waiting=waiting,
            free_blocks=free_blocks,
            cache_usage=1.0 - free_blocks / self._blocks if self._blocks else 0.0,
            histograms=self._distributions.data(),
        )

    def _count_step(self, output: EngineCoreOutput) -> None:
        self._generated += sum(len(event.token_ids) for event in output.events)
        self._distributions.step(output, time.monotonic())
        if output.counters is not None:
            self._core = output.counters
            self.now(output.running, output.waiting, output.free_blocks)

    def _count_request(self, request: FinishedRequest) -> None:
        self._finished[request.reason] += 1
        self._prompt += request.prompt_tokens
        self._cached += request.cached_tokens
        if request.first_token is not None and request.last_token is not None:
            self._first_tokens += 1
            self._first_seconds += request.first_token - request.arrival
            self._whole_seconds += request.last_token - request.arrival
        self._distributions.finish(request)

    def _guard(self, count: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            count()
        except Exception:
            self._broken = True
            _logger.exception("metrics failed and are not counted any more")
