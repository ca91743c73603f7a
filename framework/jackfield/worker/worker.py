"""Worker: one rank with its device, model, cache and runner."""

from __future__ import annotations

from collections.abc import Callable

from jackfield.distributed import SingleCommunicator
from jackfield.interfaces import DrafterEnv, StepLimits
from jackfield.kv_cache import CacheGroup, CachePlan, plan_cache
from jackfield.protocol import ModelRunnerOutput, SchedulerOutput
from jackfield.sampling import SamplingState
from jackfield.worker.build import WorkerSpec, attention_env, build_model
from jackfield.worker.input_batch import InputBatch
from jackfield.worker.model_runner import ModelRunner, RunnerParts
from jackfield.worker.storage import allocate_cache


class Worker:
    """One rank. ``start`` may take long (weights); after it ``execute`` runs steps."""

    def __init__(self, spec: WorkerSpec, rank: int = 0) -> None:
        self.spec = spec
        self.rank = rank
        self._platform = spec.platform.bind(rank, spec.config)
        self._communicator = SingleCommunicator()

    def start(self, progress: Callable[[int, int], None] | None = None) -> CachePlan:
        """Load the model, allocate the cache and return its plan. ``progress`` gets (bytes done, bytes in all)."""
        spec, device = self.spec, self._platform.device
        model = build_model(spec, device, self._communicator, progress)
        plan = self._plan_cache()
        caches = allocate_cache(plan, device)
        max_length = plan.max_model_len + spec.num_drafts
        batch = InputBatch(spec.max_num_seqs, max_length, spec.block_size, len(plan.groups), device)
        limits = StepLimits(spec.max_num_batched_tokens, spec.max_num_seqs, batch.max_blocks, max_length)
        builders = {}
        for choice in spec.attention:
            builder = choice.backend.metadata_builder(attention_env(choice, spec.block_size, device))
            builder.allocate(limits)
            builders[choice.name] = builder
        parts = RunnerParts(
            model=model,  # type: ignore[arg-type]  # a torch module cannot be checked against a Protocol
            batch=batch,
            caches=caches,
            builders=builders,
            state=SamplingState(spec.max_num_seqs, device),
            num_drafts=spec.num_drafts,
            vocab_size=spec.model_config.vocab_size,
            max_length=plan.max_model_len,
        )
        if spec.drafter is not None and spec.drafter_request is not None:
            env = DrafterEnv(
                spec.drafter_request, spec.max_num_seqs, max_length, device, spec.drafter_settings, target=model
            )
            parts.drafter = spec.drafter.build(env)
        self._runner = ModelRunner(parts)
        self.model = model
        return plan

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        return self._runner.execute(plan)

    def _plan_cache(self) -> CachePlan:
        spec = self.spec
        groups = [
            CacheGroup(c.name, c.request.layers, (c.spec,) * len(c.request.layers), c.spec.window)
            for c in spec.attention
        ]
        budget = spec.kv_cache_memory
        if budget is None:
            memory = self._platform.memory()
            budget = max(0, int(memory.total * spec.memory_utilization) - (memory.total - memory.free))
        return plan_cache(
            groups,
            spec.block_size,
            budget_bytes=budget,
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_num_seqs,
            num_blocks=spec.num_blocks,
            fit_length=spec.fit_length,
        )
