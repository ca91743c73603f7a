"""Recorded steps.

DecodeGraphs: whole decode steps as one graph: input preparation, model, greedy sampling, token write.

A step with one new token for each sequence needs only two small arrays of the host: slots and positions. Everything
else is computed on the device, so a step is one transfer and one replay. Batches are padded up to the next recorded
size with rows of the padding slot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from jackfield.interfaces import GraphApi, NotRecorded
from jackfield.protocol import SchedulerOutput
from jackfield.worker.input_batch import InputBatch, StepInputs
from jackfield.worker.transfer import Transfer

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
WARMUPS = 1
"""Runs before recording: kernels are compiled and libraries choose their algorithms then. One is enough for both."""

_logger = logging.getLogger("jackfield.worker")

Forward = Callable[[StepInputs], torch.Tensor]
"""Inputs to logits [B, V]."""


@dataclass(slots=True)
class Recorded:
    """One recorded size. ``inputs`` [2, B] are slots and positions; ``logits`` and ``ids`` hold the results of the
    last replay.
    """

    graph: Any
    inputs: torch.Tensor
    logits: torch.Tensor
    ids: torch.Tensor


class DecodeGraphs:
    """Recorded decode steps, by batch size.

    Args:
        api: of the platform. batch: the per-slot tables. forward: model from inputs to logits. transfer: to the device.
        max_sequences: largest batch. ops: of recorded steps, by name. ahead: see RecordLimits.
    """

    def __init__(
        self,
        api: GraphApi,
        batch: InputBatch,
        forward: Forward,
        transfer: Transfer,
        max_sequences: int,
        ops: Mapping[str, Callable[..., Any]],
        *,
        ahead: bool = True,
    ) -> None:
        self._api, self._batch, self._forward, self._transfer = api, batch, forward, transfer
        self._pool, self._ops, self._ahead = api.new_pool(), ops, ahead
        larger = [size for size in SIZES if size < max_sequences]
        self.sizes = (*larger, max_sequences)
        self._recorded: dict[int, Recorded] = {}
        self._unfit: set[int] = set()

    def record_all(self) -> None:
        """Record every size that is recorded ahead, the largest first: the smaller ones then fit into its memory."""
        for size in sorted(self.sizes, reverse=True) if self._ahead else self.sizes[:1]:
            self._recorded[size] = self._record(size)

    def fits(self, plan: SchedulerOutput) -> bool:
        """Return whether the plan is a decode step of a recorded size, which has no drafts in it. A size that is met
        for the first time is recorded, if it can be.
        """
        count = len(plan.slots)
        return (
            0 < count <= self.sizes[-1]
            and (plan.num_drafts is None or not plan.num_drafts.any())
            and bool((plan.counts == 1).all())
            and bool(plan.samples.all())
            and self._is_recorded(self._size_of(count))
        )

    def _size_of(self, count: int) -> int:
        return next(size for size in self.sizes if size >= count)

    def _is_recorded(self, size: int) -> bool:
        if size not in self._recorded and size not in self._unfit:
            try:
                self._recorded[size] = self._record(size)
            except NotRecorded as reason:
                # What a model does may depend on how many tokens there are.
                self._unfit.add(size)
                _logger.info("steps of %d sequences are not recorded: %s", size, reason)
        return size in self._recorded

    def replay(self, plan: SchedulerOutput) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step that fits; returns logits [B, V] and greedy ids [B], valid until the next replay.

        Greedy ids were written into the token table already.
        """
        count = len(plan.slots)
        size = self._size_of(count)
        recorded = self._recorded[size]
        host = np.zeros((2, size), dtype=np.int64)
        host[0] = self._batch.padding_slot
        host[0, :count], host[1, :count] = plan.slots, plan.starts
        recorded.inputs.copy_(self._transfer.send(host), non_blocking=True)
        self._api.replay(recorded.graph)
        return recorded.logits[:count], recorded.ids[:count]

    def replay_once(self, size: int) -> None:
        """Run a step as it was recorded, of rows that are no sequences, to see how long it takes."""
        self._api.replay(self._recorded[size].graph)

    def _record(self, size: int) -> Recorded:
        device = self._transfer.device
        inputs = torch.zeros((2, size), dtype=torch.int64, device=device)
        inputs[0] = self._batch.padding_slot
        results: dict[str, torch.Tensor] = {}

        def work() -> None:
            prepared = self._batch.prepare_uniform(inputs[0], inputs[1])
            logits = self._forward(prepared)
            ids = self._ops["greedy_tokens"](logits)
            tokens, known, slots, starts = self._batch.tokens, self._batch.known, inputs[0], inputs[1]
            self._ops["keep_tokens"](tokens, known, slots, starts, slots, ids[:, None][:, 1:], ids[:, None])
            results["logits"], results["ids"] = logits, ids

        for _ in range(WARMUPS):
            work()
        with recording(self._api, self._pool) as graph:
            work()
        return Recorded(graph, inputs, results["logits"], results["ids"])


@contextmanager
def recording(api: GraphApi, pool: Any) -> Iterator[Any]:
    """Record what is done inside; the graph can be replayed afterwards. Where that fails, nothing goes on being
    recorded.
    """
    graph = api.begin(pool)
    try:
        yield graph
    except BaseException:
        # What went wrong inside is what matters.
        with suppress(Exception):
            api.end(graph)
        raise
    api.end(graph)
