"""ModelRunner: runs one planned step. The same on every platform.

Legend: T tokens, E width, B sequences, R rows that sample, K drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import DraftBatch, Drafter, DraftOutcome, MetadataBuilder, TextModel
from jackfield.protocol import ModelRunnerOutput, SamplerOutput, SchedulerOutput
from jackfield.protocol.requests import TokenLogprobs
from jackfield.sampling import Sampler, SamplingState
from jackfield.sampling.sampler import SampleRows
from jackfield.worker.context import StepContext
from jackfield.worker.input_batch import InputBatch, StepInputs

Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class RunnerParts:
    """What a runner is put together from.

    Args:
        model: built and loaded. batch: per-slot tables. caches: planes by layer. builders: metadata builders by
            attention group, in cache-group order.
        state: sampling parameters. drafter: or None. num_drafts: K. vocab_size: drafts outside are dropped.
            max_length: of a sequence.
    """

    model: TextModel
    batch: InputBatch
    caches: Mapping[int, Mapping[str, torch.Tensor]]
    builders: Mapping[str, MetadataBuilder]
    state: SamplingState
    drafter: Drafter | None = None
    num_drafts: int = 0
    vocab_size: int = 0
    max_length: int = 0


class ModelRunner:
    """Executes plans."""

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts
        self._sampler = Sampler(parts.state)

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step: update the tables, forward, sample, draft."""
        self._apply_changes(plan)
        if not len(plan.slots):
            return ModelRunnerOutput(plan.step_id, SamplerOutput(np.empty((0, 1), dtype=np.int32)))
        parts = self._parts
        parts.batch.write_drafts(plan)
        inputs = parts.batch.prepare(plan)
        hidden_TE = self._forward(inputs)
        if not plan.samples.any():
            return ModelRunnerOutput(plan.step_id, SamplerOutput(np.empty((0, 1), dtype=np.int32)))
        return self._sample(plan, inputs, hidden_TE)

    def _apply_changes(self, plan: SchedulerOutput) -> None:
        parts = self._parts
        for slot in plan.released:
            parts.state.release(slot)
        if plan.released and parts.drafter is not None:
            parts.drafter.forget(plan.released)
        for new in plan.new:
            parts.batch.fill(new)
            parts.state.fill(new)
        parts.batch.write_blocks(plan.blocks)

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        parts = self._parts
        steps = dict(zip(parts.builders, inputs.steps, strict=True))
        context = StepContext(
            parts.caches,
            {name: parts.builders[name].build(step) for name, step in steps.items()},
            {name: step.slots for name, step in steps.items()},
        )
        return parts.model.forward(parts.model.embed(inputs.ids_T), inputs.positions_T, context)

    def _sample(self, plan: SchedulerOutput, inputs: StepInputs, hidden_TE: torch.Tensor) -> ModelRunnerOutput:
        """Sample one token behind each row's last token, and one behind each of its drafts."""
        parts = self._parts
        rows = np.flatnonzero(plan.samples)
        drafts = plan.num_drafts[rows] if plan.num_drafts is not None else np.zeros(len(rows), dtype=np.int32)
        owner = np.repeat(np.arange(len(rows)), drafts + 1)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(drafts + 1) - drafts - 1, drafts + 1)
        first = inputs.ends[rows] - 1 - drafts
        index = torch.from_numpy(first[owner] + within).to(hidden_TE.device)
        logits = parts.model.logits(hidden_TE.index_select(0, index)).float()
        slots = plan.slots[rows]
        known = (plan.starts + plan.counts)[rows] - drafts
        sample_rows = SampleRows(
            slots[owner],
            torch.from_numpy(slots[owner].astype(np.int64)).to(hidden_TE.device),
            (known[owner] + within).astype(np.int32),
            parts.batch.tokens,
        )
        raw = logits.clone() if (parts.state.logprobs[slots] > -2).any() and parts.state.edits[slots].any() else logits
        ids = self._sampler.sample(logits, sample_rows)
        logprobs = self._sampler.logprobs(raw, ids, slots[owner])
        tokens = self._verify(plan, rows, drafts, owner, within, ids.cpu().numpy())
        self._remember(slots, known, tokens)
        grouped = None if logprobs is None else _group(logprobs, owner, len(rows))
        next_drafts = self._draft(slots, known + (tokens >= 0).sum(1, dtype=np.int32)) if parts.drafter else None
        return ModelRunnerOutput(plan.step_id, SamplerOutput(tokens, grouped), next_drafts)

    def _verify(
        self,
        plan: SchedulerOutput,
        rows: npt.NDArray[np.int64],
        drafts: Ints,
        owner: npt.NDArray[np.int64],
        within: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
    ) -> Ints:
        """Return [R, 1 + K] tokens: drafts are kept as long as each equals what the target sampled in its place.

        For drafts that are certain (point masses) this keeps the target's distribution exactly: a draft d is kept
        with probability p(d), and otherwise the
        token that comes out follows p restricted to the others.
        """
        width = 1 + (self._parts.num_drafts if plan.drafts is not None else 0)
        tokens = np.full((len(rows), width), -1, dtype=np.int32)
        tokens[owner, within] = ids
        if width == 1 or plan.drafts is None:
            return tokens
        place = np.arange(width - 1)
        equal = (tokens[:, :-1] == plan.drafts[rows][:, : width - 1]) & (place < drafts[:, None])
        accepted = np.cumprod(equal, axis=1).sum(axis=1)
        tokens[np.arange(width) > accepted[:, None]] = -1
        if self._parts.drafter is not None:
            self._parts.drafter.observe(DraftOutcome(plan.slots[rows], accepted))
        return tokens

    def _remember(self, slots: Ints, known: Ints, tokens: Ints) -> None:
        """Write sampled tokens into the token table, where the next step finds them."""
        row, place = np.nonzero(tokens >= 0)
        table = self._parts.batch.tokens
        at = (torch.from_numpy((x).astype(np.int64)).to(table.device) for x in (slots[row], known[row] + place))
        table[tuple(at)] = torch.from_numpy(tokens[row, place]).to(table.device)

    def _draft(self, slots: Ints, lengths: Ints) -> Ints | None:
        parts = self._parts
        assert parts.drafter is not None
        limits = np.clip(parts.max_length - lengths, 0, parts.num_drafts)
        batch = DraftBatch(slots, parts.batch.tokens.cpu().numpy(), lengths, limits)
        ids = np.asarray(parts.drafter.propose(batch).ids, dtype=np.int32)
        return _clean_drafts(ids, limits, parts.num_drafts, parts.vocab_size)


def _clean_drafts(ids: Ints, limits: npt.NDArray[Any], width: int, vocab_size: int) -> Ints:
    """Return [R, width] drafts cut at the first illegal id and at each row's limit."""
    drafts = np.full((len(ids), width), -1, dtype=np.int32)
    drafts[:, : ids.shape[1]] = ids[:, :width]
    legal = (drafts >= 0) & (drafts < vocab_size) & (np.arange(width) < limits[:, None])
    drafts[np.cumprod(legal, axis=1) == 0] = -1
    return drafts


def _group(
    logprobs: list[TokenLogprobs | None], owner: npt.NDArray[np.int64], rows: int
) -> list[list[TokenLogprobs] | None]:
    """Return log probabilities by row; None for rows that asked for none."""
    grouped: list[list[TokenLogprobs] | None] = [None] * rows
    for row, item in zip(owner.tolist(), logprobs, strict=True):
        if item is not None:
            bucket = grouped[row] or []
            bucket.append(item)
            grouped[row] = bucket
    return grouped
