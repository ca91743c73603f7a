"""PiecewiseGraphs: steps of any mix as recordings that break where tokens are mixed.

All but attention and its kin treats every token alike, so its work depends on the number of tokens only: it is recorded
for a few numbers, and steps are padded up to the next. Attention runs between the pieces with the metadata of the real
step, on the tokens that are real. Padding tokens have negative cache slots: nothing of them is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from jackfield.interfaces import GraphApi, TextModel
from jackfield.worker.context import StepContext, Work
from jackfield.worker.graphs import WARMUPS
from jackfield.worker.input_batch import StepInputs

SIZES = (*range(64, 512, 64), *range(512, 2049, 128))
"""Close to one another, since padding is computed too. Larger steps keep a device busy longer than the host needs to
launch them one kernel at a time.
"""


@dataclass(slots=True)
class Pieces:
    """One recorded number of tokens: inputs, pieces, the work between them (whose tensors are those of the recording,
    padded), the hidden states at the end, and what layers gave that were asked for.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: dict[str, torch.Tensor]
    graphs: list[Any] = field(default_factory=list)
    between: list[tuple[str, Work]] = field(default_factory=list)
    hidden: torch.Tensor | None = None
    taps: dict[int, torch.Tensor] = field(default_factory=dict)


class _Discard:
    """Takes what mixes tokens while the model runs for the first time; it would have no metadata."""

    def leave_out(self, group: str, work: Work) -> None:
        """Leave the outputs as they are."""


class _Breaker:
    """Ends a piece where tokens are mixed and begins the next."""

    def __init__(self, api: GraphApi, pool: Any, pieces: Pieces) -> None:
        self._api, self._pool, self._pieces = api, pool, pieces

    def begin(self) -> None:
        self._pieces.graphs.append(self._api.begin(self._pool))

    def end(self) -> None:
        self._api.end(self._pieces.graphs[-1])

    def leave_out(self, group: str, work: Work) -> None:
        """Break the recording here."""
        self.end()
        self._pieces.between.append((group, work))
        self.begin()


class PiecewiseGraphs:
    """Recorded steps by number of tokens.

    Args:
        api: of the platform. model, caches, groups: what runs. max_tokens: of a step. device: where. taps: layers that
            a drafter looks at.
    """

    def __init__(
        self,
        api: GraphApi,
        model: TextModel,
        caches: Mapping[int, Mapping[str, torch.Tensor]],
        groups: tuple[str, ...],
        max_tokens: int,
        device: torch.device,
        taps: Sequence[int] = (),
    ) -> None:
        self._api, self._model, self._caches, self._groups, self._device = api, model, caches, groups, device
        self._pool, self._taps = api.new_pool(), frozenset(taps)
        self.sizes = tuple(size for size in SIZES if size <= max_tokens)
        self._recorded: dict[int, Pieces] = {}

    def record_all(self) -> None:
        """Record every size, the largest first: the smaller ones then fit into its memory."""
        for size in reversed(self.sizes):
            self._recorded[size] = self._record(size)

    def fits(self, num_tokens: int) -> bool:
        """Return whether a step of that many tokens can be replayed."""
        return bool(self.sizes) and num_tokens <= self.sizes[-1]

    def replay(self, inputs: StepInputs, metadata: Mapping[str, Any]) -> torch.Tensor:
        """Return hidden states [T, E] of a step, valid until the next replay, as are the taps in the inputs then."""
        count = len(inputs.ids_T)
        pieces = self._recorded[next(size for size in self.sizes if size >= count)]
        assert pieces.hidden is not None
        pieces.ids[:count].copy_(inputs.ids_T)
        pieces.positions[:count].copy_(inputs.positions_T)
        for (_, slots), step in zip(pieces.slots.items(), inputs.steps, strict=True):
            slots[:count].copy_(step.slots)
            slots[count:].fill_(-1)
        self._api.replay(pieces.graphs[0])
        for (group, work), graph in zip(pieces.between, pieces.graphs[1:], strict=True):
            work(metadata[group], count)
            self._api.replay(graph)
        inputs.taps = {layer: tapped[:count] for layer, tapped in pieces.taps.items()}
        return pieces.hidden[:count]

    def _record(self, size: int) -> Pieces:
        pieces = Pieces(
            torch.zeros(size, dtype=torch.int64, device=self._device),
            torch.zeros(size, dtype=torch.int64, device=self._device),
            {name: torch.full((size,), -1, dtype=torch.int64, device=self._device) for name in self._groups},
        )
        for _ in range(WARMUPS):
            self._run(pieces, _Discard())
        breaker = _Breaker(self._api, self._pool, pieces)
        breaker.begin()
        pieces.hidden = self._run(pieces, breaker)
        breaker.end()
        return pieces

    def _run(self, pieces: Pieces, recorder: Any) -> torch.Tensor:
        context = StepContext(self._caches, {}, pieces.slots, recorder=recorder, taps=self._taps)
        hidden_TE = self._model.forward(self._model.embed(pieces.ids), pieces.positions, context)
        pieces.taps = context.tapped
        return hidden_TE
