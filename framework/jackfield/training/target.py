"""The target model at work: the engine's own worker, fed with whole pieces of text.

Legend: N tokens or rows, B pieces, L tokens of the longest, E width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from jackfield.interfaces import (
    ANY,
    DraftBatch,
    Drafter,
    DrafterEnv,
    DrafterRequest,
    Drafts,
    Platform,
    Settings,
    TargetStep,
    TrainingBatch,
)
from jackfield.protocol import NewSequence, SamplingParams, SchedulerOutput
from jackfield.training.texts import Piece
from jackfield.worker import Worker, WorkerSpec

HEAD_ROWS = 64
"""Columns of the output projection that are found at a time."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Sizes of a step: ``rows`` pieces, ``tokens`` in all, ``length`` tokens of a piece."""

    rows: int
    tokens: int
    length: int


class LoadedTarget:
    """Implements :class:`jackfield.interfaces.TrainingTarget`.

    Args:
        model: built and loaded. dtype: its type. width: E. device: where it is.
    """

    def __init__(self, model: Any, dtype: torch.dtype, width: int, device: torch.device) -> None:
        self._model, self._dtype, self._width, self.device = model, dtype, width, device

    @torch.no_grad()
    def embed(self, ids_N: torch.Tensor) -> torch.Tensor:
        """See TrainingTarget."""
        with self._plain():
            embeds: torch.Tensor = self._model.embed(ids_N.flatten())
        return embeds.float().view(*ids_N.shape, -1)

    @torch.no_grad()
    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """See TrainingTarget."""
        with self._plain():
            logits: torch.Tensor = self._model.logits(hidden_NE.to(self._dtype))
        return logits.float()

    @torch.no_grad()
    def head(self, ids_N: torch.Tensor | None = None) -> torch.Tensor:
        """See TrainingTarget. Whatever form the weight is stored in, logits of unit vectors are its columns."""
        unit_EE = torch.eye(self._width, device=self.device)
        columns = []
        for rows in torch.split(unit_EE, HEAD_ROWS):
            logits = self.logits(rows)
            columns.append(logits if ids_N is None else logits[:, ids_N])
        return torch.cat(columns).t().contiguous()

    def _plain(self) -> torch.autocast:
        """The target computes in its own type, also where the trainer's is lowered."""
        return torch.autocast(self.device.type, enabled=False)


class Listener(Drafter):
    """Stands where a drafter would, and keeps what it is shown."""

    name = "training"
    kinds: ClassVar[frozenset[str]] = ANY
    needs: ClassVar[frozenset[str]] = frozenset({"last_hidden", "taps"})
    placement: ClassVar[str] = "device"

    def __init__(self, taps: Sequence[int]) -> None:
        self.taps = taps
        self.step: TargetStep | None = None

    @classmethod
    def build(cls, env: DrafterEnv) -> Listener:
        """Return one that looks at no layer but the last."""
        return cls(())

    def propose(self, batch: DraftBatch) -> Drafts:
        """Return nothing; no step asks."""
        return Drafts(np.full((len(batch.slots), 1), -1, dtype=np.int32))

    def follow(self, step: TargetStep) -> None:
        """See Drafter."""
        self.step = step


class TargetRunner:
    """Runs the target on batches of pieces.

    Args:
        spec: of a worker without a drafter. limits: of steps. look: is given the target once it is loaded, and returns
            the layers to tap. progress: of loading.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        limits: RunLimits,
        look: Callable[[LoadedTarget], Sequence[int]],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        made: list[Listener] = []
        width, dtype = spec.model_config.hidden_size, getattr(torch, spec.dtype)
        self._platform = spec.platform.bind(0, spec.config)
        self.device = self._platform.device

        class Looking(Listener):
            @classmethod
            def build(cls, env: DrafterEnv) -> Listener:
                made.append(cls(look(LoadedTarget(env.target, dtype, width, env.device))))
                return made[0]

        self._groups, self._block_size = len(spec.attention), spec.block_size
        self._worker = Worker(_prefill_only(spec, limits, Looking))
        self._worker.start(progress)
        self._listener = made[0]
        self._steps, self._used = 0, 0

    @torch.no_grad()
    def run(self, pieces: Sequence[Piece]) -> TrainingBatch:
        """Return the batch of pieces, on the device."""
        lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
        with torch.autocast(self.device.type, enabled=False):  # as it runs for requests, whatever the trainer does
            self._worker.launch(self._plan(pieces, lengths)).result()
        step, self._listener.step = self._listener.step, None
        assert step is not None, "a step was followed by nobody"
        lengths_B = torch.from_numpy(lengths).to(self.device)
        inside_BL = torch.arange(int(lengths.max()), device=self.device) < lengths_B[:, None]
        ids_T = torch.from_numpy(np.concatenate(pieces).astype(np.int64)).to(self.device)
        hidden_BLE, *taps = (_padded(states_TE, inside_BL) for states_TE in (step.hidden, *step.taps))
        ids_BL = ids_T.new_zeros(inside_BL.shape).masked_scatter_(inside_BL, ids_T)
        # The next step may reuse what this one's results lie in.
        self._platform.synchronize()
        return TrainingBatch(ids_BL, lengths_B, hidden_BLE, taps)

    def _plan(self, pieces: Sequence[Piece], lengths: np.ndarray[Any, Any]) -> SchedulerOutput:
        """Return a step that computes whole pieces from their beginnings, and samples nothing."""
        count, size = len(pieces), self._block_size
        needed = -(-lengths // size)
        owners = np.repeat(np.arange(count), needed).astype(np.int32)
        firsts = np.repeat(np.cumsum(needed) - needed, needed)
        places = (np.arange(len(owners)) - firsts).astype(np.int32)
        ids = np.arange(1, len(owners) + 1, dtype=np.int32)
        released, self._used = list(range(self._used)), count
        self._steps += 1
        return SchedulerOutput(
            step_id=self._steps,
            slots=np.arange(count, dtype=np.int32),
            starts=np.zeros(count, dtype=np.int32),
            counts=lengths.astype(np.int32),
            samples=np.zeros(count, dtype=np.bool_),
            new=[
                NewSequence(slot, "training", piece, len(piece), SamplingParams(), (), seed=0)
                for slot, piece in enumerate(pieces)
            ],
            released=released,
            blocks=[(owners, places, ids + group * len(owners)) for group in range(self._groups)],
        )


def _prefill_only(spec: WorkerSpec, limits: RunLimits, listener: type[Drafter]) -> WorkerSpec:
    """Return what a worker needs that computes pieces and nothing else: its cache holds one step."""
    size, config = spec.block_size, spec.model_config
    request = DrafterRequest(
        kind=listener.name,
        vocab_size=config.vocab_size,
        target_layers=config.num_layers,
        hidden_size=config.hidden_size,
    )
    return replace(
        spec,
        platform=_unrecorded(spec.platform),
        drafter=listener,
        drafter_request=request,
        drafter_settings=Settings(),
        max_model_len=limits.length,
        fit_length=False,
        max_num_seqs=limits.rows,
        max_num_batched_tokens=limits.tokens,
        step_tokens=limits.tokens,
        num_drafts=0,
        num_blocks=1 + max(1, len(spec.attention)) * (limits.tokens // size + limits.rows),
        pooler=None,
        draft=None,
    )


def _unrecorded(platform: type[Platform]) -> type[Platform]:
    """Return the platform as one whose steps are neither recorded nor warmed up: none is ever decoded."""
    return type(platform.__name__, (platform,), {"asynchronous": False})


def _padded(states_TE: torch.Tensor, inside_BL: torch.Tensor) -> torch.Tensor:
    """Return [B, L, E] in float32; a copy that gradients may be taken with, unlike what steps compute."""
    padded = torch.zeros((*inside_BL.shape, states_TE.shape[-1]), device=states_TE.device)
    padded[inside_BL] = states_TE.float()
    return padded
