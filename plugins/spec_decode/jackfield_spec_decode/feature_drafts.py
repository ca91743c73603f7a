"""Drafts of a module that takes the target's features beside tokens, and has a cache of its own.

At position i the module takes the target's feature there and the token behind it, and says what comes behind that. In
every step it sees all tokens that the target computed; when it drafts, it goes on from its own features.

Legend: B sequences, T tokens, E width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import DraftBatch, DraftModel, Drafts, TargetStep
from jackfield_spec_decode.draft_rows import limited, no_drafts

Ints = npt.NDArray[Any]


class FeatureDrafts:
    """Runs the module.

    Args:
        model: with ``module(embeds, features, positions, context)``, ``module.fuse`` and ``module.logits``. target:
            whose embedding is shared, and whose head may be.
    """

    def __init__(self, model: DraftModel, target: Any) -> None:
        self._model, self._module, self._target = model, model.module, target
        self._slots: Ints = np.empty(0, dtype=np.int32)
        self._features = self._states = torch.empty(0)

    def follow(self, step: TargetStep) -> None:
        """Take the features of a step, and keep those behind each last token for the drafts that come next."""
        self._slots = self._slots[:0]
        near = step.starts + step.counts < self._model.max_length
        rows = np.flatnonzero(near)
        if not len(rows):
            return
        slots, counts = step.slots[rows], step.counts[rows]
        begun = self._model.begin(slots, step.starts[rows], counts)
        ordered = rows[begun.order]
        firsts, sizes = step.first[ordered], step.counts[ordered]
        index = np.concatenate([np.arange(at, at + size) for at, size in zip(firsts, sizes, strict=True)])
        index_T = torch.from_numpy(index.astype(np.int64)).to(step.hidden.device)
        given = torch.cat([tap[index_T] for tap in step.taps], -1) if step.taps else step.hidden[index_T]
        features_TE, states_TE = self._module(
            self._target.embed(begun.next_ids), self._module.fuse(given), begun.positions, begun.context
        )
        ends = (begun.ends - 1)[np.argsort(begun.order)][step.samples[rows]]
        last_B = torch.from_numpy(ends.astype(np.int64)).to(features_TE.device)
        self._slots = slots[step.samples[rows]]
        self._features, self._states = features_TE[last_B], states_TE[last_B]

    def propose(self, batch: DraftBatch) -> Drafts:
        """Return drafts [B, K], each drawn behind the one before it."""
        assert batch.draw is not None
        features_BE, states_BE, limits = self._kept(batch)
        if not limits.any():
            return no_drafts(len(limits))
        ids: list[torch.Tensor] = []
        for place in range(int(limits.max())):
            if place:
                rows = np.flatnonzero(limits > place)
                index = torch.from_numpy(rows).to(features_BE.device)
                starts, ones = batch.lengths[rows] + place - 2, np.ones(len(rows), dtype=np.int32)
                begun = self._model.begin(batch.slots[rows], starts, ones)
                embeds = self._target.embed(ids[-1][index])
                features_BE[index], states_BE[index] = self._module(
                    embeds, features_BE[index], begun.positions, begun.context
                )
            ids.append(batch.draw(self._module.logits(states_BE, self._target).float(), place))
        return limited(ids, limits)

    def _kept(self, batch: DraftBatch) -> tuple[torch.Tensor, torch.Tensor, Ints]:
        """Return features and states [B, E] of the batch's sequences, and [B] drafts for each: none without them."""
        place = {slot: at for at, slot in enumerate(self._slots.tolist())}
        at = np.array([place.get(slot, -1) for slot in batch.slots.tolist()], dtype=np.int64)
        limits = np.where(at >= 0, np.clip(self._model.max_length + 1 - batch.lengths, 0, batch.limits), 0)
        if not limits.any():
            return self._features, self._states, limits
        index = torch.from_numpy(at.clip(min=0)).to(self._features.device)
        return self._features[index], self._states[index], limits
