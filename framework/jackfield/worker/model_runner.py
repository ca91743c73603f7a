"""ModelRunner: runs one planned step. The same on every platform.

Legend: T tokens, E width, B sequences, R rows that sample, K drafts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import Drafter, LogitsProcessor, MetadataBuilder, StreamApi, TargetStep, TextModel
from jackfield.protocol import ModelRunnerOutput, Recordings, SamplerOutput, SchedulerOutput
from jackfield.protocol.requests import TokenLogprobs
from jackfield.sampling import Sampler, SamplingState
from jackfield.sampling.draw import draw_tokens
from jackfield.sampling.sampler import Draw, LogprobsMode, SampleRows
from jackfield.worker.compaction import Compactor
from jackfield.worker.context import StepContext
from jackfield.worker.features import FeatureTable
from jackfield.worker.graphs import DecodeGraphs
from jackfield.worker.input_batch import InputBatch, StepInputs
from jackfield.worker.pending import PendingStep
from jackfield.worker.piecewise import PiecewiseGraphs
from jackfield.worker.pooling import Pooler, split_results
from jackfield.worker.prompt_logprobs import score_prompts
from jackfield.worker.recorded_seconds import recorded_seconds
from jackfield.worker.rounds import RoundGraphs, TargetPass
from jackfield.worker.speculation import Places, Speculation, SpeculationLimits, Verified
from jackfield.worker.state_backup import StateBackup
from jackfield.worker.transfer import Transfer

Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class RunnerParts:
    """What a runner is put together from.

    Args:
        model: built and loaded. batch: per-slot tables. caches: planes by layer. builders: metadata builders by
            attention choice, in cache-group order. state: sampling parameters. transfer: to the device.
        stream_api: None where work is synchronous. graphs, pieces, rounds: recorded steps, or None.
        processors: plugged logits processors by name. drafter: or None. speculation: its limits. backup: of states,
            where the model has some and there is a drafter. compactor: of the cache, where drafts may branch. slots:
            sequences that run at once. logprobs_mode: what log probabilities are of.
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
    rounds: RoundGraphs | None = None
    processors: Mapping[str, LogitsProcessor] | None = None
    drafter: Drafter | None = None
    speculation: SpeculationLimits | None = None
    backup: StateBackup | None = None
    compactor: Compactor | None = None
    slots: int = 0
    logprobs_mode: LogprobsMode = "raw_logprobs"
    features: FeatureTable | None = None
    pooler: Pooler | None = None
    draw: Draw = draw_tokens


@dataclass(slots=True)
class Computed:
    """What a step left: its inputs, all hidden states [T, E], and those [N, E] behind which it samples."""

    inputs: StepInputs
    hidden_TE: torch.Tensor
    hidden_NE: torch.Tensor


class ModelRunner:
    """Executes plans, in the order in which they are launched."""

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts
        self._sampler = Sampler(parts.state, parts.processors, parts.logprobs_mode, parts.draw)
        self._stream = parts.stream_api.new_stream() if parts.stream_api else None
        self._taps = tuple(parts.drafter.taps) if parts.drafter is not None else ()
        self._followed = parts.drafter is not None and _sees_every_step(parts.drafter)
        self._reads_text_alone = parts.drafter is not None and parts.drafter.needs <= {"tokens"}
        self._watched = False
        self._speculation: Speculation | None = None
        if parts.drafter is not None and parts.speculation is not None:
            self._speculation = Speculation(
                parts.drafter, self._sampler, parts.speculation, parts.slots, parts.transfer
            )

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
    def record(self, graphs: DecodeGraphs, pieces: PiecewiseGraphs, rounds: RoundGraphs | None) -> Recordings:
        """Record steps that may be replayed, use the recordings from now on, and return what they take.

        Args:
            rounds: None where speculation, if there is any, cannot be recorded.
        """
        api, parts = self._parts.stream_api, self._parts
        with api.use(self._stream) if api else nullcontext():
            pieces.record_all()
            parts.pieces = pieces
            if rounds is not None and self._drafts_in(rounds):
                rounds.record_all()
                parts.rounds = rounds
                if rounds.drafts and self._speculation is not None:
                    self._speculation.read_from(parts.batch.tokens)
            # Decode steps show a drafter nothing: one that must see all can do without where rounds draft.
            if not self._followed or (parts.rounds is not None and parts.rounds.drafts):
                graphs.record_all()
                parts.graphs = graphs
        return self._measured()

    def _drafts_in(self, rounds: RoundGraphs) -> bool:
        """Return whether the drafter is still there once it was tried."""
        assert self._speculation is not None, "rounds are of drafts"
        if rounds.drafts:
            self._speculation.guard(lambda _: rounds.try_drafter())
        return self._speculation.drafter is not None

    def _measured(self) -> Recordings:
        """Return seconds of recorded steps, where drafts make it a question which to take."""
        parts, api = self._parts, self._parts.stream_api
        if parts.rounds is None or parts.graphs is None:
            return Recordings()
        with api.use(self._stream) if api else nullcontext():
            return recorded_seconds(parts.graphs, parts.rounds, self._wait, followed=self._followed)

    def _wait(self) -> None:
        if (api := self._parts.stream_api) is not None:
            api.synchronize(api.record(self._stream))

    def forget_recordings(self) -> None:
        """Launch every step op by op from now on: hooks of modules do not run in recorded ones. A round that was
        planned ahead is still replayed: only the device knows what it is.
        """
        self._parts.graphs = self._parts.pieces = None
        self._watched = True

    def forward_taps(self, inputs: StepInputs) -> torch.Tensor:
        """Return final hidden states [T, E] of a step's tokens; what layers gave is in the inputs then."""
        return self._forward(inputs)

    def forward_logits(self, inputs: StepInputs) -> torch.Tensor:
        """Return logits [T, V] of every token of a step, in the model's type. Nothing is kept for the drafter: decode
        steps are run so, and show it nothing.
        """
        return self._parts.model.logits(self._forward(inputs, tapped=False))

    def _launch(self, plan: SchedulerOutput) -> PendingStep:
        parts = self._parts
        self._apply_changes(plan)
        if not len(plan.slots):
            return _nothing_sampled(plan)
        merges = parts.features is not None and parts.features.touches(plan)
        recorded = parts.rounds is not None and (plan.ahead or not self._watched) and not merges
        if recorded and parts.rounds is not None and parts.rounds.fits(plan):
            return self._round(plan, parts.rounds)
        blind = plan.num_drafts is None or self._reads_text_alone
        if parts.graphs is not None and blind and parts.graphs.fits(plan) and not merges:
            logits, ids = parts.graphs.replay(plan)
            if plan.num_drafts is not None:
                return self._verify_and_draft(plan, Places.of(plan), logits)
            if parts.state.plain_greedy(plan.slots):
                return self._deliver(plan, ids)
            return self._sample(plan, logits, plan.slots, plan.starts + 1)
        parts.batch.write_drafts(plan)
        inputs = parts.batch.prepare(plan)
        if parts.backup is not None:
            parts.backup.save(plan, inputs)
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
        if not self._verifies(plan):
            self._follow(plan, plan.counts, inputs, hidden_TE)
        pending.prompt_logprobs = scores
        return pending

    def _follow(self, plan: SchedulerOutput, counts: Ints, inputs: StepInputs, hidden_TE: torch.Tensor) -> None:
        """Show the drafter a step whose tokens are known now; ``counts`` [B] are those that count."""
        if self._speculation is None:
            return
        seen = np.arange(len(plan.slots)) if plan.unseen is None else np.flatnonzero(~plan.unseen)
        if not len(seen):
            return
        first, taps = inputs.ends - plan.counts, [inputs.taps[layer] for layer in self._taps]
        step = TargetStep(
            plan.slots[seen], plan.starts[seen], counts[seen], plan.samples[seen], first[seen], hidden_TE, taps
        )
        self._speculation.guard(lambda drafter: drafter.follow(step))

    def _sample_any(self, plan: SchedulerOutput, inputs: StepInputs, hidden_TE: torch.Tensor) -> PendingStep:
        parts = self._parts
        if not plan.samples.any():
            return _nothing_sampled(plan)
        if self._verifies(plan):
            return self._sample_with_drafts(plan, inputs, hidden_TE)
        rows = np.flatnonzero(plan.samples)
        hidden_RE = hidden_TE.index_select(0, parts.transfer.send(inputs.ends[rows] - 1))
        logits = parts.model.logits(hidden_RE)
        return self._sample(plan, logits, plan.slots[rows], (plan.starts + plan.counts)[rows])

    def _verifies(self, plan: SchedulerOutput) -> bool:
        """Return whether a step that is no recorded round verifies drafts or makes some."""
        if plan.num_drafts is None or not plan.samples.any():
            return False
        return bool(plan.num_drafts.any()) or not self._drafts_later(plan)

    def _drafts_later(self, plan: SchedulerOutput) -> bool:
        """Return whether drafting is left to the next round, which lacks nothing of this step then."""
        rounds, speculation = self._parts.rounds, self._speculation
        if rounds is None or speculation is None or self._watched or not rounds.drafts:
            return False
        return len(plan.slots) <= max(rounds.sizes) and not speculation.draws(plan.slots)

    def _apply_changes(self, plan: SchedulerOutput) -> None:
        parts = self._parts
        for slot in plan.released:
            parts.state.release(slot)
            if parts.features is not None:
                parts.features.release(slot)
        if self._speculation is not None:
            if plan.released:
                self._speculation.release(plan.released)
            self._speculation.fill(plan.new)
        parts.batch.fill(plan.new)
        parts.state.fill(plan.new)
        if parts.features is not None:
            parts.features.fill(plan.new)
        if parts.pooler is not None:
            parts.pooler.fill(plan.new)
        parts.batch.write_blocks(plan.blocks)

    def _forward(
        self,
        inputs: StepInputs,
        merged: SchedulerOutput | None = None,
        *,
        replay: bool = False,
        tapped: bool = True,
    ) -> torch.Tensor:
        """Return final hidden states [T, E]; with ``replay`` by a recording where one fits.

        Args:
            merged: the plan, when embeddings must be put in places of placeholders. tapped: leave what layers gave, for
                the drafter, in the inputs.
        """
        parts = self._parts
        # Groups of a draft model come behind those of the target.
        steps = dict(zip(parts.builders, inputs.steps, strict=False))
        metadata = {name: parts.builders[name].build(step) for name, step in steps.items()}
        recorded = replay and merged is None
        if recorded and parts.pieces is not None and parts.pieces.fits(len(inputs.ids_T)):
            return parts.pieces.replay(inputs, metadata)
        slots, taps = {name: step.slots for name, step in steps.items()}, self._taps if tapped else ()
        context = StepContext(parts.caches, metadata, slots, token_types=inputs.types_T, taps=frozenset(taps))
        inputs.taps = context.tapped
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
        host, speculation = self._parts.transfer.fetch(ids.int()), self._speculation
        by_row = None if logprobs is None else [None if item is None else [item] for item in logprobs]

        def finish() -> ModelRunnerOutput:
            if speculation is not None:
                speculation.note(plan, host.numpy())
            return ModelRunnerOutput(plan.step_id, SamplerOutput(host.numpy()[:, None], by_row))

        return PendingStep(finish)

    def _sample_with_drafts(self, plan: SchedulerOutput, inputs: StepInputs, hidden_TE: torch.Tensor) -> PendingStep:
        """Sample behind each row's last token and behind each of its drafts, verify, and draft for the next step."""
        parts, places = self._parts, Places.of(plan)
        first = inputs.ends[places.rows] - 1 - places.drafts
        hidden_NE = hidden_TE.index_select(0, parts.transfer.send(first[places.owner] + places.within))
        return self._verify_and_draft(
            plan, places, parts.model.logits(hidden_NE), Computed(inputs, hidden_TE, hidden_NE)
        )

    def _verify_and_draft(
        self, plan: SchedulerOutput, places: Places, logits: torch.Tensor, computed: Computed | None = None
    ) -> PendingStep:
        """Sample from logits [N, V], verify, and draft for the next step. ``computed``: what the step left besides;
        None where it was replayed whole, which steps with drafts are not.
        """
        parts, speculation = self._parts, self._speculation
        assert speculation is not None, "a plan has drafts, but there is no drafter"
        slots = places.slots[places.owner]
        rows = SampleRows(slots, parts.transfer.send_index(slots), places.lengths, parts.batch.tokens)
        ids, edited = self._sampler.sample(logits, rows)
        verified = speculation.verify(plan, places, ids, edited)
        tokens, accepted = verified.tokens, verified.accepted
        if computed is not None and places.parents is not None:
            computed.hidden_TE = self._compact(plan, computed.inputs, places, verified, computed.hidden_TE)
        row, place = np.nonzero(tokens >= 0)
        parts.batch.write_tokens(places.slots[row], places.known[row] + place, tokens[row, place])
        shown = edited if self._sampler.shows_processed else logits
        output = ModelRunnerOutput(plan.step_id, SamplerOutput(tokens, self._logprobs_of(verified, places, shown)))
        if computed is not None:
            self._settle(plan, places, accepted, computed)
        speculation.observe(places.slots, accepted)
        lengths = places.known + (tokens >= 0).sum(1, dtype=np.int32)
        wanted = None if plan.draft_limits is None else plan.draft_limits[places.rows]
        if self._drafts_later(plan):
            return PendingStep(lambda: output)
        began = time.monotonic()
        # Behind the drafts that were kept is the state that the last token was sampled from.
        every = np.arange(len(accepted))
        last = parts.transfer.send_index(np.searchsorted(places.owner, every) + verified.sources[every, accepted])
        final = parts.transfer.send_index(tokens[every, accepted])
        states = None if computed is None else computed.hidden_NE[last]
        proposed = speculation.propose(places.slots, lengths, wanted, states, final)
        output.next_drafts, output.next_parents = proposed or (None, None)
        output.draft_seconds = time.monotonic() - began
        return PendingStep(lambda: output)

    def _round(self, plan: SchedulerOutput, rounds: RoundGraphs) -> PendingStep:
        """Verify drafts, and draft for the next step, by recordings."""
        parts, speculation = self._parts, self._speculation
        assert speculation is not None and plan.num_drafts is not None, "rounds are of drafts"
        left = rounds.verify(plan)
        if not rounds.drafts or speculation.draws(plan.slots):
            places = Places.of(plan)
            width = left.ids_BN.shape[1]
            at = parts.transfer.send_index(places.owner * width + places.within)
            hidden_NE = left.hidden_TE[at]
            computed = None if self._reads_text_alone else Computed(left.inputs, left.hidden_TE, hidden_NE)
            return self._verify_and_draft(plan, places, left.logits_TV[at], computed)
        shown, plain = left.logits_TV, parts.state.plain_greedy(plan.slots)
        if not plain:
            shown = self._sample_round(plan, left)
        pending = self._deliver_round(plan, rounds.draft(len(plan.slots)), shown)
        # To sample others, the host must know where they stand.
        pending.leads = plain
        return pending

    def _sample_round(self, plan: SchedulerOutput, left: TargetPass) -> torch.Tensor:
        """Put sampled tokens in the place of the largest logits; return the logits that they were drawn from."""
        parts, (count, width) = self._parts, left.ids_BN.shape
        slots = np.repeat(plan.slots, width)
        lengths: Ints = (plan.starts[:, None] + 1 + np.arange(width)).astype(np.int32).flatten()
        rows = SampleRows(slots, parts.transfer.send_index(slots), lengths, parts.batch.tokens)
        ids, edited = self._sampler.sample(left.logits_TV, rows)
        left.ids_BN.copy_(ids.view(count, width))
        return edited if self._sampler.shows_processed else left.logits_TV

    def _deliver_round(self, plan: SchedulerOutput, result: torch.Tensor, shown_TV: torch.Tensor) -> PendingStep:
        """Return what a round gave: tokens [B, 1 + K] and the drafts behind them.

        Args:
            result: both, one behind the other. shown_TV: logits that log probabilities are of.
        """
        speculation, width = self._speculation, result.shape[1] // 2 + 1
        assert speculation is not None, "rounds are of drafts"
        host, logprobs = self._parts.transfer.fetch(result), None
        if (self._parts.state.logprobs[plan.slots] > -2).any():
            tokens = result[:, :width].cpu().numpy()
            sources = np.broadcast_to(np.arange(width), tokens.shape)
            verified = Verified(tokens, (tokens >= 0).sum(1) - 1, sources)
            places = Places.of(plan)
            whole = replace(places, owner=np.repeat(places.rows, width))
            logprobs = self._logprobs_of(verified, whole, shown_TV)

        def finish() -> ModelRunnerOutput:
            tokens, drafts = host.numpy()[:, :width], host.numpy()[:, width:]
            speculation.learn(plan.slots, tokens)
            return ModelRunnerOutput(plan.step_id, SamplerOutput(tokens, logprobs), next_drafts=drafts)

        return PendingStep(finish)

    def _settle(
        self, plan: SchedulerOutput, places: Places, accepted: npt.NDArray[np.int64], computed: Computed
    ) -> None:
        """Take back states that refused drafts changed, and show the drafter what counts of the step."""
        if self._parts.backup is not None:
            self._parts.backup.restore(plan, places.rows[accepted < places.drafts])
        counts = plan.counts.copy()
        counts[places.rows] -= (places.drafts - accepted).astype(np.int32)
        self._follow(plan, counts, computed.inputs, computed.hidden_TE)

    def _compact(
        self, plan: SchedulerOutput, inputs: StepInputs, places: Places, verified: Verified, hidden_TE: torch.Tensor
    ) -> torch.Tensor:
        """Move drafts that were kept to where the text has them: in the cache, in the hidden states, which are
        returned, and in what layers gave.
        """
        rows, sources, targets = verified.moved
        if not len(rows):
            return hidden_TE
        compactor = self._parts.compactor
        assert compactor is not None, "drafts branch, but nothing moves those that are kept"
        known = places.known[rows]
        compactor.move(inputs.steps, places.rows[rows], known + sources, known + targets)
        order = np.arange(len(hidden_TE))
        first = (inputs.ends[places.rows] - places.drafts)[rows]
        order[first + targets] = first + sources
        order_T = self._parts.transfer.send_index(order)
        inputs.taps = {layer: tapped[order_T] for layer, tapped in inputs.taps.items()}
        return hidden_TE[order_T]

    def _logprobs_of(
        self, verified: Verified, places: Places, shown_NV: torch.Tensor
    ) -> list[list[TokenLogprobs] | None] | None:
        """Return log probabilities of the tokens that count, by row."""
        send = self._parts.transfer.send_index
        if not (self._parts.state.logprobs[places.slots] > -2).any():
            return None
        rows, place = np.nonzero(verified.tokens >= 0)
        sampled = np.searchsorted(places.owner, rows) + verified.sources[rows, place]
        logprobs = self._sampler.logprobs(
            shown_NV[send(sampled)], send(verified.tokens[rows, place]), places.slots[rows]
        )
        return None if logprobs is None else _group(logprobs, rows, len(places.rows))


def _sees_every_step(drafter: Drafter) -> bool:
    """Return whether the drafter must see what the target computes, which recorded steps do not show."""
    return bool(drafter.needs & {"last_hidden", "taps"}) and type(drafter).follow is not Drafter.follow


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
