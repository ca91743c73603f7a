"""A model on several ranks of one process: threads that meet at their collectives.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jackfield.engine.core import worker_spec
from jackfield.engine.setup import prepare
from jackfield.interfaces import AttentionStep, RankInfo
from jackfield.loader import finalize
from jackfield.testing.attention_cases import CPU, Query, empty_plane, make_step
from jackfield.worker.build import AttentionChoice, WorkerSpec, attention_env, fill_model, make_model
from jackfield.worker.context import StepContext

BLOCK = 16


class Meeting:
    """Where threads exchange tensors."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor."""
        self._parts[rank] = tensor.clone()
        self._barrier.wait()
        found = list(self._parts)
        self._barrier.wait()
        return found

    def abort(self) -> None:
        """Let the others go: this rank does not come."""
        self._barrier.abort()


class ThreadCommunicator:
    """Implements :class:`jackfield.interfaces.Communicator`."""

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks."""
        return torch.stack(self._meeting.exchange(self.rank, tensor)).sum(0)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the ranks' tensors concatenated."""
        return torch.cat(self._meeting.exchange(self.rank, tensor), dim)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Return rank ``source``'s tensor."""
        return tensor.copy_(self._meeting.exchange(self.rank, tensor)[source])


def on_ranks(size: int, work: Callable[[ThreadCommunicator], torch.Tensor]) -> list[torch.Tensor]:
    """Run ``work`` on every rank and return the results; the first exception comes out."""
    meeting = Meeting(size)

    def run(rank: int) -> torch.Tensor:
        try:
            with torch.inference_mode():
                return work(ThreadCommunicator(meeting, rank, size))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        failures = [error for future in futures if (error := future.exception()) is not None]
        causes = [error for error in failures if not isinstance(error, threading.BrokenBarrierError)]
        if failures:
            raise (causes or failures)[0]
        return [future.result() for future in futures]


def logits_on_ranks(
    folder: Path, settings: Mapping[str, Any], prompts: Sequence[Sequence[int]], size: int
) -> list[torch.Tensor]:
    """Return each rank's logits [T, V] of prompts that are computed side by side in one step."""
    own = dict(settings)
    plugins = own.pop("plugins", ())
    resolution = prepare(str(folder), None, own, plugins=plugins, skip_tokenizer_init=True).resolution
    spec = worker_spec(resolution)
    return on_ranks(size, lambda communicator: _logits(spec, prompts, communicator))


def _logits(spec: WorkerSpec, prompts: Sequence[Sequence[int]], communicator: ThreadCommunicator) -> torch.Tensor:
    rank = RankInfo(communicator.rank, communicator.size)
    spec = replace(spec, attention=tuple(_for_rank(choice, rank) for choice in spec.attention), block_size=BLOCK)
    model: Any = make_model(spec, CPU, communicator)
    fill_model(spec, model, CPU)
    finalize(model)
    pages = np.arange(1, 1 + sum(-(-len(ids) // BLOCK) for ids in prompts), dtype=np.int32)
    # Sequences with one new token go first, as the engine does.
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]) != 1)
    step = make_step([Query(len(prompts[index])) for index in order], BLOCK, pages)
    step.states = torch.tensor([[-1, 1 + row] for row in range(len(prompts))], dtype=torch.int32)
    context = _context(spec, step, len(pages) + len(prompts) + 1)
    ids = torch.tensor([token for index in order for token in prompts[index]])
    logits: torch.Tensor = model.logits(model(model.embed(ids), step.positions, context))
    rows = dict(zip(order, torch.split(logits, [len(prompts[index]) for index in order]), strict=True))
    return torch.cat([rows[index] for index in range(len(prompts))])


def _for_rank(choice: AttentionChoice, rank: RankInfo) -> AttentionChoice:
    request = replace(choice.request, rank=rank)
    # Prefill and decode by two backends is nothing that the kit asks for.
    backend: Any = choice.backend
    specs: Iterable[Any] = backend.cache_specs(request)
    return replace(choice, request=request, spec=next(iter(specs)))


def _context(spec: WorkerSpec, step: AttentionStep, pages: int) -> StepContext:
    caches, metadata = {}, {}
    for choice in spec.attention:
        metadata[choice.name] = choice.backend.metadata_builder(attention_env(choice, BLOCK, CPU)).build(step)
        for layer in choice.layers:
            caches[layer] = {p.name: empty_plane(p, pages, BLOCK, CPU, 0.0) for p in choice.spec.planes}
    return StepContext(caches, metadata, dict.fromkeys(metadata, step.slots))
