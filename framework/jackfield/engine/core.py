"""EngineCore: the loop of schedule, execute and update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jackfield.checkpoint import open_tensors
from jackfield.errors import EngineDeadError
from jackfield.executor import Executor, InProcessExecutor
from jackfield.executor.base import Pending
from jackfield.interfaces import Settings
from jackfield.kv_cache import CachePlan, KVCacheManager, split_layers
from jackfield.layers.composite import Composite
from jackfield.oracle.resolution import AttentionDecision, DraftModelDecision, RecordedRounds, Resolution
from jackfield.protocol import EngineCoreOutput, EngineCoreRequest, SchedulerOutput
from jackfield.scheduler import Scheduler, SchedulerLimits
from jackfield.worker import WorkerSpec
from jackfield.worker.build import AttentionChoice

_logger = logging.getLogger("jackfield.engine")


@dataclass(slots=True)
class InFlight:
    """A launched step."""

    plan: SchedulerOutput
    pending: Pending


class EngineCore:
    """Owns the scheduler and the executor. Not thread-safe: one thread adds, steps and aborts.

    Args:
        resolution: what was decided. progress: called with (bytes done, bytes in all) while weights are loaded.
    """

    def __init__(self, resolution: Resolution, progress: Callable[[int, int], None] | None = None) -> None:
        config = resolution.config
        self._executor: Executor = InProcessExecutor(worker_spec(resolution))
        self.plan: CachePlan = self._executor.start(progress)
        drafts = config.speculative.num_speculative_tokens or 0 if resolution.drafter else 0
        self._limits = SchedulerLimits(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens or 0,
            max_model_len=self.plan.max_model_len,
            long_prefill_threshold=config.scheduler.long_prefill_token_threshold,
            chunked_prefill=config.scheduler.enable_chunked_prefill,
            num_drafts=drafts,
            adaptive_drafts=config.speculative.adaptive,
            drafts_drawn=bool(resolution.drafter and resolution.drafter.drafter.draws)
            and config.speculative.draft_sample_method == "probabilistic",
            # The token that a step samples, and all drafts behind it.
            lookahead=1 + drafts if resolution.drafter and resolution.drafter.model else 0,
            largest_draft_batch=config.speculative.disable_by_batch_size,
            recordings=self._executor.recordings(),
        )
        cache = KVCacheManager(
            self.plan.groups,
            self.plan.block_size,
            self.plan.num_blocks,
            self._limits.max_num_seqs,
            caching=config.cache.enable_prefix_caching,
            events=config.cache.kv_events,
            step_tokens=self.plan.step_tokens,
        )
        self.scheduler = Scheduler(self._limits, cache, resolution.policy.policy.build(resolution.policy.settings))
        self._overlapped = bool(config.scheduler.async_scheduling)
        self._in_flight: InFlight | None = None
        self._dead: BaseException | None = None
        tokens = self.plan.num_tokens
        _logger.info(
            "KV cache: %d tokens, %.1f times the maximum length of %d",
            tokens,
            tokens / self.plan.max_model_len,
            self.plan.max_model_len,
        )

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a request."""
        self._check_alive()
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request; returns False when it is unknown or over."""
        return self.scheduler.abort(request_id)

    def pause(self) -> None:
        """Plan no further step. Steps in flight are accounted as long as :meth:`has_work` says so; requests stay where
        they are, with what they hold, and new ones may be added.
        """
        self.scheduler.paused = True

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self.scheduler.paused = False

    def has_work(self) -> bool:
        """Return whether :meth:`step` has anything to do."""
        return self.scheduler.has_work()

    def step(self) -> EngineCoreOutput:
        """Advance by one step.

        Raises:
            EngineDeadError: this or an earlier step failed; nothing can be served any more.
        """
        self._check_alive()
        try:
            return self._step_overlapped() if self._overlapped else self._step()
        except Exception as error:
            self._dead = error
            raise EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}") from error

    def _step(self) -> EngineCoreOutput:
        plan = self.scheduler.schedule()
        result = self._executor.launch(plan).result()
        return self.scheduler.update(plan, result)

    def _step_overlapped(self) -> EngineCoreOutput:
        """The same with one step in flight: a step is scheduled and launched before the one before it is accounted,
        unless its drafts must be known first.
        """
        before = self._in_flight
        if before is not None and self.scheduler.awaits(before.plan, before.pending.leads):
            self._in_flight = None
            return self.scheduler.update(before.plan, before.pending.result())
        plan = self.scheduler.schedule()
        self._in_flight = InFlight(plan, self._executor.launch(plan))
        if before is None:
            return EngineCoreOutput([])
        return self.scheduler.update(before.plan, before.pending.result())

    def shutdown(self) -> None:
        """Stop the workers."""
        self._executor.shutdown()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine stopped earlier: {self._dead}", remedy="start a new engine")


def worker_spec(resolution: Resolution) -> WorkerSpec:
    """Return what workers need of a resolution."""
    config = resolution.config
    drafter = resolution.drafter
    spec = WorkerSpec(
        config=config,
        facts=resolution.facts,
        platform=resolution.platform,
        architecture=resolution.architecture,
        model_config=resolution.model_config,
        quantization=resolution.quantization,
        plain=resolution.plain,
        attention=tuple(_choices(resolution.attention)),
        ops={op: (d.provider, d.request, d.settings) for op, d in resolution.ops.items()},
        named_ops=frozenset(op for op, decision in resolution.ops.items() if decision.named),
        experts=resolution.experts,
        drafter=drafter.drafter if drafter else None,
        drafter_request=drafter.request if drafter else None,
        drafter_settings=drafter.settings if drafter else Settings(),
        dtype=config.model.dtype,
        block_size=config.cache.block_size or 16,
        max_model_len=config.model.max_model_len or 0,
        fit_length=not config.is_user_set("model.max_model_len"),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens or 0,
        step_tokens=(config.scheduler.max_num_batched_tokens or 0) * (2 if config.scheduler.async_scheduling else 1),
        num_drafts=(config.speculative.num_speculative_tokens or 0) if drafter else 0,
        num_blocks=config.cache.num_blocks,
        kv_cache_memory=config.cache.kv_cache_memory,
        memory_utilization=config.cache.gpu_memory_utilization,
        load_format=config.model.load_format,
        seed=config.model.seed or 0,
        open_tensors=open_tensors,
        processors=tuple((p.processor, p.settings) for p in resolution.processors),
        pooler=resolution.pooler,
        quantization_settings=resolution.quantization_settings,
        rounds_verified=drafter is not None and drafter.rounds is not RecordedRounds.NONE,
        rounds_drafted=drafter is not None and drafter.rounds is RecordedRounds.DRAFTED,
    )
    return spec if drafter is None or drafter.model is None else replace(spec, draft=_draft_spec(spec, drafter.model))


def _draft_spec(spec: WorkerSpec, model: DraftModelDecision) -> WorkerSpec:
    """Return what a worker needs of a draft model, beside the target's."""
    return replace(
        spec,
        facts=model.facts,
        architecture=model.architecture,
        model_config=model.model_config,
        dtype=model.dtype,
        quantization=model.quantization,
        plain=model.plain,
        quantization_settings=model.quantization_settings,
        experts=model.experts,
        attention=tuple(_choice(decision) for decision in model.attention),
        load_format=model.load_format,
        drafter=None,
        vocabulary=model.vocabulary,
    )


def _choices(decisions: Sequence[AttentionDecision]) -> Iterator[AttentionChoice]:
    """Yield one choice for each cache group: decisions about many more layers than others have become several."""
    keeping = {d.name: d.request.layers for d in decisions if d.spec.planes}
    parts = split_layers(keeping)
    for decision in decisions:
        choice = _choice(decision)
        for number, layers in enumerate(parts.get(decision.name, ())):
            yield replace(choice, name=f"{choice.name}/{number}" if number else choice.name, part=layers)
        if decision.name not in parts:
            yield choice


def _choice(decision: AttentionDecision) -> AttentionChoice:
    same = decision.prefill is decision.decode
    backend = decision.prefill if same else Composite(decision.prefill, decision.decode)
    return AttentionChoice(decision.name, backend, decision.request, decision.spec, decision.settings)
