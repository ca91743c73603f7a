"""Worker: one rank with its device, model, cache and runner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from jackfield.distributed import SingleCommunicator
from jackfield.interfaces import (
    SAMPLING_OPS,
    STEP_OPS,
    Drafter,
    DrafterEnv,
    GraphApi,
    GraphSupport,
    HostLengths,
    LogitsEnv,
    LogitsProcessor,
    MetadataBuilder,
    NotRecorded,
    PoolerConfig,
    StepLimits,
)
from jackfield.kv_cache import CacheGroup, CachePlan, plan_cache, retention_of
from jackfield.kv_cache.planning import page_bytes
from jackfield.loader import load_projection
from jackfield.protocol import Recordings, SchedulerOutput
from jackfield.sampling import SamplingState
from jackfield.worker.build import WorkerSpec, attention_env, build_model
from jackfield.worker.compaction import Compactor
from jackfield.worker.draft_model import PagedDraftModel, join
from jackfield.worker.features import FeatureTable
from jackfield.worker.graphs import DecodeGraphs
from jackfield.worker.input_batch import InputBatch
from jackfield.worker.model_runner import ModelRunner, RunnerParts
from jackfield.worker.pending import PendingStep
from jackfield.worker.piecewise import PiecewiseGraphs
from jackfield.worker.pooling import Heads, Pooler
from jackfield.worker.rounds import SIZES as ROUND_SIZES
from jackfield.worker.rounds import RoundGraphs
from jackfield.worker.speculation import SpeculationLimits
from jackfield.worker.state_backup import StateBackup, backup_pages
from jackfield.worker.storage import Planes, allocate_cache
from jackfield.worker.transfer import Transfer
from jackfield.worker.warmup import warm_experts, warm_up

_logger = logging.getLogger("jackfield.worker")


class Worker:
    """One rank. ``start`` may take long (weights); after it ``launch`` runs steps."""

    def __init__(self, spec: WorkerSpec, rank: int = 0) -> None:
        self.spec = spec
        self.rank = rank
        self._platform = spec.platform.bind(rank, spec.config)
        self._communicator = SingleCommunicator()
        self.recordings = Recordings()

    def start(self, progress: Callable[[int, int], None] | None = None) -> CachePlan:
        """Load the model, allocate the cache and return its plan. ``progress`` gets (bytes done, bytes in all)."""
        spec, device = self.spec, self._platform.device
        model = build_model(spec, device, self._communicator, progress)
        draft = build_model(spec.draft, device, self._communicator) if spec.draft is not None else None
        layout = join(self._groups(), spec.draft.attention if spec.draft is not None else ())
        plan = self._plan_cache(layout.groups)
        transfer = Transfer(device)
        max_length = plan.max_model_len + spec.num_drafts
        typed = spec.model_config.token_types > 1
        self._ops = {name: self._op(name) for name in (*STEP_OPS, *SAMPLING_OPS)}
        batch = InputBatch(
            spec.max_num_seqs, max_length, spec.block_size, plan.groups, transfer, typed=typed, ops=self._ops
        )
        spare = self._backup_pages(plan.groups)
        caches = allocate_cache(replace(plan, num_blocks=plan.num_blocks + spare), device)
        backup = StateBackup(plan.groups, caches, plan.num_blocks, spec.max_num_seqs) if spare else None
        builders = self._builders(spec, batch, max_length)
        drafting = None
        if spec.draft is not None and draft is not None:
            own = self._builders(spec.draft, batch, max_length)
            drafting = PagedDraftModel(draft, spec.draft, batch, layout, own, caches, spec.model_config.vocab_size)
        parts = RunnerParts(
            model=model,  # type: ignore[arg-type]  # a torch module cannot be checked against a Protocol
            batch=batch,
            caches=caches,
            builders=builders,
            state=SamplingState(spec.max_num_seqs, device),
            transfer=transfer,
            stream_api=self._platform.stream_api(),
            processors=self._processors(),
            drafter=self._drafter(model, max_length, drafting),
            backup=backup,
            compactor=self._compactor(plan.groups, caches, transfer),
            speculation=self._speculation_limits(plan.max_model_len),
            slots=spec.max_num_seqs,
            logprobs_mode=spec.config.get("sampling.logprobs_mode"),
            features=FeatureTable(transfer, getattr(torch, spec.dtype), spec.model_config.hidden_size),
            draw=self._ops["draw_tokens"],
            pooler=Pooler(spec.pooler, self._heads(spec.pooler, model)) if spec.pooler else None,
        )
        self._runner = ModelRunner(parts)
        self._record_steps(parts, plan.max_model_len)
        if spec.platform.asynchronous:
            warm_experts(model, spec.max_num_batched_tokens)
            warm_up(
                self._runner,
                block_size=spec.block_size,
                groups=len(plan.groups),
                num_blocks=plan.num_blocks,
                max_length=plan.max_model_len,
                max_sequences=spec.max_num_seqs,
                max_tokens=spec.max_num_batched_tokens,
                pooling=spec.pooler is not None,
            )
        self.model = model
        return plan

    def watched_model(self) -> nn.Module:
        """Return the model, whose modules' hooks run in every step from now on."""
        self._runner.forget_recordings()
        return self.model

    def launch(self, plan: SchedulerOutput) -> PendingStep:
        """Start a step."""
        return self._runner.launch(plan)

    def _heads(self, pooler: PoolerConfig, model: Any) -> Heads:
        """Return what the model has behind its hidden states."""
        dense = tuple((one, load_projection(one, self._platform.device)) for one in pooler.projections)
        classify, logits, project = (getattr(model, name, None) for name in ("classify", "logits", "project"))
        return Heads(classify, logits, project, dense)

    def _builders(self, spec: WorkerSpec, batch: InputBatch, max_length: int) -> dict[str, MetadataBuilder]:
        limits = StepLimits(spec.max_num_batched_tokens, spec.max_num_seqs, batch.max_blocks, max_length)
        builders = {}
        for choice in spec.attention:
            env = attention_env(choice, spec.block_size, self._platform.device)
            builders[choice.name] = choice.backend.metadata_builder(env)
            builders[choice.name].allocate(limits)
        return builders

    def _processors(self) -> dict[str, LogitsProcessor]:
        vocab_size, device = self.spec.model_config.vocab_size, self._platform.device
        built = ((c.name, c.build(LogitsEnv(vocab_size, device, settings))) for c, settings in self.spec.processors)
        return dict(built)

    def _op(self, name: str) -> Callable[..., Any]:
        provider, request, settings = self.spec.ops[name]
        return provider.build(name, request, settings)

    def _speculation_limits(self, max_length: int) -> SpeculationLimits:
        spec = self.spec
        return SpeculationLimits(
            spec.num_drafts,
            max_length,
            spec.model_config.vocab_size,
            spec.config.get("speculative.rejection_sample_method"),
            greedy_drafts=spec.config.get("speculative.draft_sample_method") == "greedy",
            branches=self._branches,
        )

    @property
    def _branches(self) -> bool:
        """Whether drafts may branch."""
        return self.spec.drafter is not None and self.spec.drafter.branches(self.spec.drafter_settings)

    def _compactor(
        self, groups: Sequence[CacheGroup], caches: Mapping[int, Planes], transfer: Transfer
    ) -> Compactor | None:
        return Compactor(groups, caches, self.spec.block_size, transfer) if self._branches else None

    def _drafter(self, model: nn.Module, max_length: int, drafting: PagedDraftModel | None) -> Drafter | None:
        spec = self.spec
        if spec.drafter is None or spec.drafter_request is None:
            return None
        env = DrafterEnv(
            spec.drafter_request,
            spec.max_num_seqs,
            max_length,
            self._platform.device,
            spec.drafter_settings,
            target=model,
            build=None if drafting is None else lambda: drafting,
        )
        return spec.drafter.build(env)

    def _record_steps(self, parts: RunnerParts, max_length: int) -> None:
        """Record steps where the platform has graphs, and the model and every backend can be part of one."""
        spec, api, drafter = self.spec, self._platform.graph_api(), parts.drafter
        able = spec.architecture.recordable and all(
            choice.backend.graph_support >= GraphSupport.DECODE and choice.backend.host_lengths is not HostLengths.EXACT
            for choice in spec.attention
        )
        if api is None or not able or parts.pooler is not None:
            return
        limits = self._platform.records
        largest = min(spec.max_num_seqs, spec.max_num_batched_tokens, limits.sequences or spec.max_num_seqs)
        forward = self._runner.forward_logits
        graphs = DecodeGraphs(api, parts.batch, forward, parts.transfer, largest, self._ops, ahead=limits.ahead)
        pieces = PiecewiseGraphs(
            api,
            parts.model,
            parts.caches,
            tuple(parts.builders),
            spec.max_num_batched_tokens if limits.tokens is None else limits.tokens,
            self._platform.device,
            drafter.taps if drafter is not None else (),
        )
        try:
            self.recordings = self._runner.record(graphs, pieces, self._rounds(api, parts, max_length))
        except NotRecorded as reason:
            _logger.info("steps are not recorded: %s", reason)

    def _rounds(self, api: GraphApi, parts: RunnerParts, max_length: int) -> RoundGraphs | None:
        """Return rounds of speculation to be recorded, or None."""
        spec = self.spec
        most = min(spec.max_num_seqs, spec.max_num_batched_tokens // (1 + spec.num_drafts), *ROUND_SIZES[-1:])
        if not spec.rounds_verified or parts.drafter is None or most < 1:
            return None
        return RoundGraphs(
            api,
            parts.batch,
            self._runner.forward_taps,
            parts.model.logits,
            parts.transfer,
            spec.num_drafts,
            (*(size for size in ROUND_SIZES if size < most), most),
            spec.model_config.vocab_size,
            max_length,
            self._ops,
            parts.drafter if spec.rounds_drafted else None,
        )

    def _groups(self) -> list[CacheGroup]:
        return [
            CacheGroup(c.name, c.layers, (c.spec,) * len(c.layers), c.spec.window, retention_of(c.request.kind, c.spec))
            for c in self.spec.attention
        ]

    def _backup_pages(self, groups: Sequence[CacheGroup]) -> int:
        return backup_pages(groups, self.spec.max_num_seqs) if self.spec.drafter is not None else 0

    def _plan_cache(self, groups: Sequence[CacheGroup]) -> CachePlan:
        spec = self.spec
        budget = spec.kv_cache_memory
        if budget is None:
            memory = self._platform.memory()
            budget = max(0, int(memory.total * spec.memory_utilization) - (memory.total - memory.free))
        budget = max(0, budget - self._backup_pages(groups) * page_bytes(groups, spec.block_size))
        return plan_cache(
            groups,
            spec.block_size,
            budget_bytes=budget,
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_num_seqs,
            num_blocks=spec.num_blocks,
            fit_length=spec.fit_length,
            step_tokens=spec.step_tokens,
        )
