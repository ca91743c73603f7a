"""Drafts of a module that says all of them at once: behind the last token that is known stand masks.

At position i the module takes the target's feature there and the token behind it, and says what comes behind that. One
pair is known for the first draft. For each of the others there is a mask: one learnt embedding and one learnt feature
stand for all that nobody knows yet. What is stored for masks is overwritten when the target has computed the tokens.

Legend: B sequences, K drafts, T tokens, E width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import DraftBatch, DraftModel, DraftRound, Drafts, TargetStep
from jackfield_spec_decode.draft_rows import limited, no_drafts, places, rows_of

Ints = npt.NDArray[Any]


class ParallelDrafts:
    """Runs the module.

    Args:
        model: with an :class:`jackfield_spec_decode.eagle_model.Eagle3Module` that has masks. target: whose head may be
            shared. count: K.
    """

    def __init__(self, model: DraftModel, target: Any, count: int) -> None:
        self._model, self._module, self._target, self._count = model, model.module, target, count
        with torch.no_grad():
            self._embed_1E, self._feature_1E = self._module.unknown()
        self._slots: Ints = np.empty(0, dtype=np.int32)
        self._made: Ints = np.empty(0, dtype=np.int64)
        self._states = torch.empty(0)

    def follow(self, step: TargetStep) -> None:
        """Take the features of a step, with masks behind each sequence that drafts come next for: one pass."""
        self._slots = self._slots[:0]
        rows = np.flatnonzero(step.starts + step.counts < self._model.max_length)
        if not len(rows):
            return
        slots, counts, samples = step.slots[rows], step.counts[rows], step.samples[rows]
        masks = self._masks(step.starts[rows] + counts, counts, samples)
        begun = self._model.begin(slots, step.starts[rows], (counts + masks).astype(np.int32))
        order, device = begun.order, step.hidden.device
        sizes = (counts + masks)[order]
        index = places(step.first[rows][order], sizes)
        within = places(np.zeros_like(sizes), sizes)
        real = within < np.repeat(counts[order], sizes)
        index_T, real_T1 = (torch.from_numpy(a).to(device) for a in (np.where(real, index, 0), real[:, None]))
        given_TF = torch.cat([tap[index_T] for tap in step.taps], -1)
        _, states_TE = self._module(
            torch.where(real_T1, self._module.embed(begun.next_ids), self._embed_1E),
            torch.where(real_T1, self._module.fuse(given_TF), self._feature_1E),
            begun.positions,
            begun.context,
        )
        self._slots, self._made = slots[samples], 1 + masks[samples]
        last = (begun.ends - 1)[np.argsort(order)][samples]
        at_BK = np.minimum((last - masks[samples])[:, None] + np.arange(self._count), last[:, None])
        self._states = states_TE[torch.from_numpy(at_BK.astype(np.int64)).to(device)]

    def propose(self, batch: DraftBatch) -> Drafts:
        """Return drafts [B, K]; there are fewer where the pass was full, or the sequence nearly is."""
        assert batch.draw is not None
        at = rows_of(batch.slots, self._slots)
        made = np.append(self._made, 0)[at]
        limits = np.where(at >= 0, np.minimum(made, batch.limits), 0)
        if not limits.any():
            return no_drafts(len(limits))
        states_BKE = self._states[torch.from_numpy(at.clip(min=0)).to(self._states.device)]
        ids = []
        for place in range(int(limits.max())):
            logits_BV = self._module.logits(states_BKE[:, place], self._target)
            ids.append(batch.draw(logits_BV.float(), place))
        return limited(ids, limits)

    def draft(self, step: DraftRound) -> torch.Tensor:
        """Return drafts [B, K], -1 where there is no room. Recorded passes have as many tokens of each sequence as a
        round at most, so that masks have a pass of their own. N is the tokens of each sequence in the round.
        """
        count, width = step.num_drafts, step.num_drafts + 1
        near_B = torch.minimum(step.kept + 1, self._model.max_length - 1 - step.starts)
        begun = self._model.recorded(step.slots, step.starts, near_B, width)
        given_TF = torch.cat(list(step.taps), -1).flatten(0, 1)
        _, states_TE = self._module(
            self._module.embed(begun.next_ids), self._module.fuse(given_TF), begun.positions, begun.context
        )
        states_BKE = states_TE[step.rows * width + step.kept].unsqueeze(1)
        before_B = step.starts + step.kept
        room_B = torch.minimum(step.room, self._model.max_length - 1 - before_B)
        if count > 1:
            begun = self._model.recorded(step.slots, before_B, room_B, count - 1, shift=1)
            total = len(step.rows) * (count - 1)
            _, more_TE = self._module(
                self._embed_1E.repeat(total, 1), self._feature_1E.repeat(total, 1), begun.positions, begun.context
            )
            states_BKE = torch.cat((states_BKE, more_TE.unflatten(0, (-1, count - 1))), 1)
        ids_BK: torch.Tensor = self._module.likeliest(states_BKE.flatten(0, 1), self._target).unflatten(0, (-1, count))
        return ids_BK.masked_fill(step.places >= room_B.unsqueeze(1), -1)

    def _masks(self, ends: Ints, counts: Ints, samples: Ints) -> Ints:
        """Return [B] how many masks stand behind each sequence's tokens; ``ends``: the position behind the last."""
        room = np.clip(self._model.max_length - 1 - ends, 0, self._count - 1)
        # A step that is full of prompts leaves no room in a pass: there are fewer drafts behind it.
        spare = max(self._model.max_tokens - int(counts.sum()), 0) // max(int(samples.sum()), 1)
        return np.where(samples, np.minimum(room, spare), 0)
