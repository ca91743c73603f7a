"""Drafts of a module that takes the target's features beside tokens, and has a cache of its own.

At position i the module takes the target's feature there and the token behind it, and says what comes behind that. In
every step it sees all tokens that the target computed; when it drafts, it goes on from its own features.

Legend: B sequences, T tokens, E width; of trees R sequences, W drafts that are grown on, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import DraftBatch, DraftModel, DraftRound, Drafts, DraftTree, TargetStep
from jackfield_spec_decode.draft_rows import limited, no_drafts, places, rows_of
from jackfield_spec_decode.tree_growth import GrowingTree

Ints = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Growth:
    """How trees are grown: drafts in all, those that each level grows on, and levels."""

    count: int
    width: int
    depth: int


@dataclass(slots=True)
class Tips:
    """The drafts that the next level grows on, of R sequences W each.

    Args:
        ids_RW: tokens. features_RWE: that they go on from. bits_RW: what they see of drafts that are stored already.
    """

    ids_RW: torch.Tensor
    features_RWE: torch.Tensor
    bits_RW: Ints


class FeatureDrafts:
    """Runs the module.

    Args:
        model: with ``module(embeds, features, positions, context)``, ``module.fuse`` and ``module.logits``. target:
            whose head may be shared, and whose embedding is. embed: in place of the target's.
    """

    def __init__(self, model: DraftModel, target: Any, embed: Any = None) -> None:
        self._model, self._module, self._target = model, model.module, target
        self._embed = target.embed if embed is None else embed
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
        index_T = torch.from_numpy(places(firsts, sizes)).to(step.hidden.device)
        given = torch.cat([tap[index_T] for tap in step.taps], -1) if step.taps else step.hidden[index_T]
        features_TE, states_TE = self._module(
            self._embed(begun.next_ids), self._module.fuse(given), begun.positions, begun.context
        )
        ends = (begun.ends - 1)[np.argsort(begun.order)][step.samples[rows]]
        last_B = torch.from_numpy(ends.astype(np.int64)).to(features_TE.device)
        self._slots = slots[step.samples[rows]]
        self._features, self._states = features_TE[last_B], states_TE[last_B]

    def draft(self, step: DraftRound) -> torch.Tensor:
        """Return drafts [B, K], each the likeliest behind the one before it, -1 where there is no room. N is the tokens
        of each sequence in the round.
        """
        width = step.num_drafts + 1
        near_B = torch.minimum(step.kept + 1, self._model.max_length - 1 - step.starts)
        begun = self._model.recorded(step.slots, step.starts, near_B, width)
        given = torch.cat(list(step.taps), -1) if step.taps else step.hidden
        features_TE, states_TE = self._module(
            self._embed(begun.next_ids), self._module.fuse(given.flatten(0, 1)), begun.positions, begun.context
        )
        last_B = step.rows * width + step.kept
        features_BE, states_BE = features_TE[last_B], states_TE[last_B]
        before_B = step.starts + step.kept
        room_B = torch.minimum(step.room, self._model.max_length - 1 - before_B)
        ids = [self._likeliest(states_BE)]
        for place in range(1, step.num_drafts):
            # What is drafted at a place is computed one token before it.
            begun = self._model.recorded(step.slots, before_B, room_B, shift=place)
            embeds_BE = self._embed(ids[-1])
            features_BE, states_BE = self._module(embeds_BE, features_BE, begun.positions, begun.context)
            ids.append(self._likeliest(states_BE))
        # Where the draft model ends before the target does, there is less room than the step says.
        ids_BK = torch.stack(ids, 1)
        return ids_BK.masked_fill(step.places >= room_B.unsqueeze(1), -1)

    def _likeliest(self, states_BE: torch.Tensor) -> torch.Tensor:
        # A head over a part of the vocabulary need not make logits over all of it.
        if hasattr(self._module, "likeliest"):
            return self._module.likeliest(states_BE, self._target)  # type: ignore[no-any-return]
        return self._module.logits(states_BE, self._target).argmax(-1)  # type: ignore[no-any-return]

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
                embeds = self._embed(ids[-1][index])
                features_BE[index], states_BE[index] = self._module(
                    embeds, features_BE[index], begun.positions, begun.context
                )
            ids.append(batch.draw(self._module.logits(states_BE, self._target).float(), place))
        return limited(ids, limits)

    def grow(self, batch: DraftBatch, growth: Growth) -> Drafts:
        """Return trees of drafts, the likeliest by the module."""
        features_BE, states_BE, limits = self._kept(batch)
        # What is grown on is stored behind the known tokens, one draft after another.
        room = batch.lengths - 1 + growth.width * (growth.depth - 1) <= self._model.max_length
        rows = np.flatnonzero((limits > 0) & room)
        ids = np.full((len(limits), growth.count), -1, dtype=np.int64)
        parents = np.full_like(ids, -1)
        at_once = max(1, self._model.max_tokens // growth.width)
        for first in range(0, len(rows), at_once):
            part = rows[first : first + at_once]
            index = torch.from_numpy(part).to(features_BE.device)
            tree = self._tree(batch.slots[part], batch.lengths[part], features_BE[index], states_BE[index], growth)
            drafts, above = (made.cpu().numpy() for made in tree.best(growth.count))
            ids[part, : drafts.shape[1]], parents[part, : drafts.shape[1]] = drafts, above
        return Drafts(ids, parents) if len(rows) else no_drafts(len(limits))

    def _tree(
        self, slots: Ints, lengths: Ints, features_RE: torch.Tensor, states_RE: torch.Tensor, growth: Growth
    ) -> GrowingTree:
        tree, count = GrowingTree(growth.width), len(slots)
        logits_RWV = self._module.logits(states_RE, self._target).unsqueeze(1)
        tips, stored = Tips(torch.empty(0), features_RE.unsqueeze(1), np.zeros((count, 1), dtype=np.int64)), 0
        for level in range(growth.depth):
            tips = _next_tips(tree, logits_RWV, tips)
            if level + 1 == growth.depth:
                break
            width = tips.ids_RW.shape[1]
            tips.bits_RW |= np.int64(1) << np.arange(stored, stored + width, dtype=np.int64)
            masked = DraftTree(
                np.repeat(lengths - 1, width).astype(np.int32),
                tips.bits_RW.flatten(),
                np.repeat(lengths - 1 + level, width).astype(np.int64),
            )
            counts = np.full(count, width, dtype=np.int32)
            begun = self._model.begin(slots, (lengths - 1 + stored).astype(np.int32), counts, masked)
            embeds = self._embed(tips.ids_RW.flatten())
            features_TE, states_TE = self._module(
                embeds, tips.features_RWE.flatten(0, 1), begun.positions, begun.context
            )
            tips.features_RWE = features_TE.unflatten(0, (count, width))
            logits_RWV = self._module.logits(states_TE, self._target).unflatten(0, (count, width))
            stored += width
        return tree

    def _kept(self, batch: DraftBatch) -> tuple[torch.Tensor, torch.Tensor, Ints]:
        """Return features and states [B, E] of the batch's sequences, and [B] drafts for each: none without them."""
        at = rows_of(batch.slots, self._slots)
        limits = np.where(at >= 0, np.clip(self._model.max_length + 1 - batch.lengths, 0, batch.limits), 0)
        if not limits.any():
            return self._features, self._states, limits
        index = torch.from_numpy(at.clip(min=0)).to(self._features.device)
        return self._features[index], self._states[index], limits


def _next_tips(tree: GrowingTree, logits_RWV: torch.Tensor, tips: Tips) -> Tips:
    """Return the drafts that are grown on of those that come behind the given ones."""
    ids_RW, above_RW = tree.grow(logits_RWV)
    rows_R1 = torch.arange(len(ids_RW), device=ids_RW.device).unsqueeze(1)
    bits = np.take_along_axis(tips.bits_RW, above_RW.cpu().numpy(), 1)
    return Tips(ids_RW, tips.features_RWE[rows_R1, above_RW], bits)
