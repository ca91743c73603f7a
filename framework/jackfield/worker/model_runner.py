"""ModelRunner: runs one planned step. The same on every platform.

Legend: T tokens, E width, B sequences, R rows that sample, K drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import Drafter, DraftOutcome, LogitsProcessor, MetadataBuilder, StreamApi, TextModel
from jackfield.protocol import ModelRunnerOutput, SamplerOutput, SchedulerOutput
from jackfield.protocol.requests import TokenLogprobs
from jackfield.sampling import Sampler, SamplingState
from jackfield.sampling.draw import draw_tokens
from jackfield.sampling.sampler import Draw, LogprobsMode, SampleRows
from jackfield.worker.context import StepContext
from jackfield.worker.features import FeatureTable
from jackfield.worker.graphs import DecodeGraphs
from jackfield.worker.input_batch import InputBatch, StepInputs
from jackfield.worker.pending import PendingStep
from jackfield.worker.piecewise import PiecewiseGraphs
from jackfield.worker.pooling import Pooler, split_results
from jackfield.worker.prompt_logprobs import score_prompts
from jackfield.worker.speculation import propose, verify
from jackfield.worker.transfer import Transfer

Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class RunnerParts:
    """What a runner is put together from.

    Args:
        model: built and loaded. batch: per-slot tables. caches: planes by layer. builders: metadata builders by
            attention choice, in cache-group order. state: sampling parameters. transfer: to the device.
        stream_api: None where work is synchronous. graphs, pieces: recorded steps, or None.
        processors: plugged logits processors by name. drafter: or None. num_drafts: K. vocab_size: drafts outside are
            dropped. max_length: of a sequence. logprobs_mode: what log probabilities are of.
        features: embeddings that stand for placeholders, or None. pooler: makes vectors instead of tokens, or None.
        draw: the op ``draw_tokens``.
    """

    model: TextModel
    batch: InputBatch
    caches: Mapping[int, Mapping[str, torch.Tensor]]
    builders: Mapping[str, MetadataBuilder]
    state: SamplingState
    transfer: Transfer
    stream_api: StreamApi | None = None
    graphs: DecodeGraphs | None = None
    pieces: PiecewiseGraphs | None = None
    processors: Mapping[str, LogitsProcessor] | None = None
    drafter: Drafter | None = None
    num_drafts: int = 0
    vocab_size: int = 0
    max_length: int = 0
    logprobs_mode: LogprobsMode = "raw_logprobs"
    features: FeatureTable | None = None
    pooler: Pooler | None = None
    draw: Draw = draw_tokens


class ModelRunner:
    """Executes plans, in the order in which they are launched."""

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts
        self._sampler = Sampler(parts.state, parts.processors, parts.logprobs_mode, parts.draw)
        self._stream = parts.stream_api.new_stream() if parts.stream_api else None

    def launch(self, plan: SchedulerOutput) -> PendingStep:
        """Start a step: update the tables, forward, sample. Where the device is asynchronous nothing waits for it."""
        api = self._parts.stream_api
        with torch.inference_mode(), api.use(self._stream) if api else nullcontext():
            pending = self._launch(plan)
            pending.failures = self._parts.state.take_failures()
            if api is not None:
                pending.stream_api, pending.event = api, api.record(self._stream)
        return pending

    @torch.inference_mode()
    def record(self, graphs: DecodeGraphs, pieces: PiecewiseGraphs) -> None:
        """Record steps and use the recordings from now on."""
        api = self._parts.stream_api
        with api.use(self._stream) if api else nullcontext():
            pieces.record_all()
            graphs.record_all()
        self._parts.graphs, self._parts.pieces = graphs, pieces

    def forward_logits(self, inputs: StepInputs) -> torch.Tensor:
        """Return logits [T, V] of every token of a step, in the model's type."""
        return self._parts.model.logits(self._forward(inputs))

    def _launch(self, plan: SchedulerOutput) -> PendingStep:
        parts = self._parts
        self._apply_changes(plan)
        if not len(plan.slots):
            return _nothing_sampled(plan)
        merges = parts.features is not None and parts.features.touches(plan)
        if parts.graphs is not None and parts.graphs.fits(plan) and not merges:
            logits, ids = parts.graphs.replay(plan)
            if parts.state.plain_greedy(plan.slots):
                return self._deliver(plan, ids)
            return self._sample(plan, logits, plan.slots, plan.starts + 1)
        parts.batch.write_drafts(plan)
        inputs = parts.batch.prepare(plan)
        hidden_TE = self._forward(inputs, plan if merges else None, replay=True)
        if parts.pooler is not None:
            return self._pool(plan, inputs, hidden_TE)
        scores = score_prompts(
            plan,
            hidden_TE,
            inputs.ends,
            parts.batch.tokens,
            parts.state,
            parts.model.logits,
            as_logits=self._sampler.as_logits,
        )
        pending = self._sample_any(plan, inputs, hidden_TE)
        pending.prompt_logprobs = scores
        return pending

    def _sample_any(self, plan: SchedulerOutput, inputs: StepInputs, hidden_TE: torch.Tensor) -> PendingStep:
        parts = self._parts
        if not plan.samples.any():
            return _nothing_sampled(plan)
        if plan.num_drafts is not None:
            return self._sample_with_drafts(plan, inputs, hidden_TE)
        rows = np.flatnonzero(plan.samples)
        hidden_RE = hidden_TE.index_select(0, parts.transfer.send(inputs.ends[rows] - 1))
        logits = parts.model.logits(hidden_RE)
        return self._sample(plan, logits, plan.slots[rows], (plan.starts + plan.counts)[rows])

    def _apply_changes(self, plan: SchedulerOutput) -> None:
        parts = self._parts
        for slot in plan.released:
            parts.state.release(slot)
            if parts.features is not None:
                parts.features.release(slot)
        if plan.released and parts.drafter is not None:
            parts.drafter.forget(plan.released)
        parts.batch.fill(plan.new)
        parts.state.fill(plan.new)
        if parts.features is not None:
            parts.features.fill(plan.new)
        if parts.pooler is not None:
            parts.pooler.fill(plan.new)
        parts.batch.write_blocks(plan.blocks)

    def _forward(
        self, inputs: StepInputs, merged: SchedulerOutput | None = None, *, replay: bool = False
    ) -> torch.Tensor:
        """Return final hidden states [T, E]; with ``replay`` by a recording where one fits.

        Args:
            merged: the plan, when embeddings must be put in places of placeholders.
        """
        parts = self._parts
        steps = dict(zip(parts.builders, inputs.steps, strict=True))
        metadata = {name: parts.builders[name].build(step) for name, step in steps.items()}
        if replay and merged is None and parts.pieces is not None and parts.pieces.fits(len(inputs.ids_T)):
            return parts.pieces.replay(inputs, metadata)
        slots = {name: step.slots for name, step in steps.items()}
        context = StepContext(parts.caches, metadata, slots, token_types=inputs.types_T)
        hidden_TE = parts.model.embed(inputs.ids_T)
        if merged is not None and parts.features is not None:
            parts.features.merge(merged, inputs.ends, hidden_TE)
        return parts.model.forward(hidden_TE, inputs.positions_T, context)

    def _pool(self, plan: SchedulerOutput, inputs: StepInputs, hidden_TE: torch.Tensor) -> PendingStep:
        """Pool the prompts that end in this step; nothing is sampled."""
        parts = self._parts
        assert parts.pooler is not None
        done = parts.pooler.step(plan, hidden_TE, inputs.ends)
        flat = torch.cat([value.flatten() for value in done.values()]) if done else hidden_TE.new_empty(0).float()
        host, rows = parts.transfer.fetch(flat), int(plan.samples.sum())

        def finish() -> ModelRunnerOutput:
            sampled = SamplerOutput(np.zeros((rows, 1), dtype=np.int32))
            return ModelRunnerOutput(plan.step_id, sampled, pooled=split_results(done, host.numpy()))

        return PendingStep(finish)

    def _sample(self, plan: SchedulerOutput, logits: torch.Tensor, slots: Ints, known: Ints) -> PendingStep:
        """Sample one token for each row, and leave it in the token table, where the next step finds it."""
        parts = self._parts
        slots_R, known_R = parts.transfer.send_index(np.stack((slots, known)))
        rows = SampleRows(slots, slots_R, known, parts.batch.tokens)
        ids, edited = self._sampler.sample(logits, rows)
        parts.batch.tokens[slots_R, known_R] = ids.int()
        shown = edited if self._sampler.shows_processed else logits
        return self._deliver(plan, ids, self._sampler.logprobs(shown, ids, slots))

    def _deliver(
        self, plan: SchedulerOutput, ids: torch.Tensor, logprobs: list[TokenLogprobs | None] | None = None
    ) -> PendingStep:
        host = self._parts.transfer.fetch(ids.int())
        by_row = None if logprobs is None else [None if item is None else [item] for item in logprobs]

        def finish() -> ModelRunnerOutput:
            return ModelRunnerOutput(plan.step_id, SamplerOutput(host.numpy()[:, None], by_row))

        return PendingStep(finish)

    def _sample_with_drafts(self, plan: SchedulerOutput, inputs: StepInputs, hidden_TE: torch.Tensor) -> PendingStep:
        """Sample behind each row's last token and behind each of its drafts, verify, and draft for the next step."""
        parts = self._parts
        assert plan.num_drafts is not None
        rows = np.flatnonzero(plan.samples)
        drafts = plan.num_drafts[rows]
        owner = np.repeat(np.arange(len(rows)), drafts + 1)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(drafts + 1) - drafts - 1, drafts + 1)
        first = inputs.ends[rows] - 1 - drafts
        hidden_RE = hidden_TE.index_select(0, parts.transfer.send(first[owner] + within))
        logits = parts.model.logits(hidden_RE)
        slots, known = plan.slots[rows], (plan.starts + plan.counts)[rows] - drafts
        lengths = (known[owner] + within).astype(np.int32)
        sample_rows = SampleRows(slots[owner], parts.transfer.send_index(slots[owner]), lengths, parts.batch.tokens)
        ids, edited = self._sampler.sample(logits, sample_rows)
        shown = edited if self._sampler.shows_processed else logits
        logprobs = self._sampler.logprobs(shown, ids, slots[owner])
        tokens, accepted = verify(plan, rows, drafts, owner, within, ids.cpu().numpy())
        row, place = np.nonzero(tokens >= 0)
        parts.batch.write_tokens(slots[row], known[row] + place, tokens[row, place])
        grouped = None if logprobs is None else _group(logprobs, owner, len(rows))
        output = ModelRunnerOutput(plan.step_id, SamplerOutput(tokens, grouped))
        if parts.drafter is not None:
            parts.drafter.observe(DraftOutcome(slots, accepted))
            output.next_drafts = propose(
                parts.drafter,
                slots,
                known + (tokens >= 0).sum(1, dtype=np.int32),
                parts.batch.tokens.cpu().numpy(),
                width=parts.num_drafts,
                max_length=parts.max_length,
                vocab_size=parts.vocab_size,
            )
        return PendingStep(lambda: output)


def _nothing_sampled(plan: SchedulerOutput) -> PendingStep:
    output = ModelRunnerOutput(plan.step_id, SamplerOutput(np.empty((0, 1), dtype=np.int32)))
    return PendingStep(lambda: output)


def _group(
    logprobs: list[TokenLogprobs | None], owner: npt.NDArray[np.int64], rows: int
) -> list[list[TokenLogprobs] | None]:
    """Return log probabilities by row; None for rows that asked for none."""
    grouped: list[list[TokenLogprobs] | None] = [None] * rows
    for row, item in zip(owner.tolist(), logprobs, strict=True):
        if item is not None:
            grouped[row] = [*(grouped[row] or []), item]
    return grouped
