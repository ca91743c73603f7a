"""Drafts of a block of masks that see one another and all states of the target.

In every step the states that the target gave are stored as context. Drafts are made in one pass over a block: the last
known token and masks behind it, each of which is filled with the token of its own place. All of a block see all of it,
which causal attention over a cache can do as well: each token of the block is a sequence of its own to it, which ends
where the block does. What is stored for the block is overwritten when the target has computed its tokens. A block needs
places for the last known token and for all drafts, one more than drafters that go on token by token.

Legend: B sequences, K drafts, N = 1 + K tokens of a block, T tokens, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import DraftBatch, DraftModel, DraftRound, Drafts, ForwardContext, TargetStep
from jackfield_spec_decode.draft_rows import limited, no_drafts, places, rows_of

Ints = npt.NDArray[Any]


class Redirected:
    """A context of another pass's cache slots. Implements :class:`jackfield.interfaces.ForwardContext`.

    Args:
        inner: what is attended to. stored: a context with the slots of the tokens.
    """

    def __init__(self, inner: ForwardContext, stored: ForwardContext) -> None:
        self._inner, self._stored = inner, stored

    def metadata(self, group: str) -> Any:
        """See ForwardContext."""
        return self._inner.metadata(group)

    def cache(self, layer: int) -> Mapping[str, torch.Tensor]:
        """See ForwardContext."""
        return self._inner.cache(layer)

    def slots(self, group: str) -> torch.Tensor:
        """See ForwardContext."""
        return self._stored.slots(group)

    @property
    def adapters(self) -> torch.Tensor | None:
        """See ForwardContext."""
        return self._inner.adapters

    def unrecorded(self, group: str, work: Callable[[Any, int], None]) -> None:
        """See ForwardContext."""
        self._inner.unrecorded(group, work)

    def angles(self, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        """See ForwardContext."""
        return self._inner.angles(rotary, positions)

    @property
    def token_types(self) -> torch.Tensor | None:
        """See ForwardContext."""
        return self._inner.token_types

    @property
    def taps(self) -> frozenset[int]:
        """See ForwardContext."""
        return self._inner.taps

    def tap(self, layer: int, hidden_TE: torch.Tensor) -> None:
        """See ForwardContext."""
        self._inner.tap(layer, hidden_TE)


class Storing(Redirected):
    """A context in which keys and values are stored, and nothing attends."""

    def __init__(self, inner: ForwardContext) -> None:
        super().__init__(inner, inner)

    def unrecorded(self, group: str, work: Callable[[Any, int], None]) -> None:
        """See ForwardContext."""


class BlockDrafts:
    """Runs the module.

    Args:
        model: with a :class:`jackfield_spec_decode.dflash_model.DFlashModule`. target: whose embedding and head are
            shared. count: K. max_sequences: most sequences of a pass.
    """

    def __init__(self, model: DraftModel, target: Any, count: int, max_sequences: int) -> None:
        self._model, self._module, self._target, self._count = model, model.module, target, count
        self._at_once = min(max_sequences, model.max_tokens) // (count + 1)
        self._slots: Ints = np.empty(0, dtype=np.int32)

    def follow(self, step: TargetStep) -> None:
        """Store the context of a step."""
        self._slots = self._slots[:0]
        rows = np.flatnonzero(step.starts + step.counts < self._model.max_length)
        if not len(rows):
            return
        slots, counts = step.slots[rows], step.counts[rows]
        begun = self._model.begin(slots, step.starts[rows], counts)
        index = places(step.first[rows][begun.order], counts[begun.order])
        index_T = torch.from_numpy(index).to(step.hidden.device)
        given_TF = torch.cat([tap[index_T] for tap in step.taps], -1)
        self._module.remember(given_TF, begun.positions, Storing(begun.context))
        self._slots = slots[step.samples[rows]]

    def propose(self, batch: DraftBatch) -> Drafts:
        """Return drafts [B, K]."""
        assert batch.draw is not None and batch.last_tokens is not None
        # Masks do not depend on how many drafts are useful: a block is filled better as it was trained.
        masks = np.clip(self._model.max_length - batch.lengths, 0, self._count)
        limits = np.where(rows_of(batch.slots, self._slots) >= 0, np.minimum(masks, batch.limits), 0)
        rows = np.flatnonzero(limits)
        if not len(rows):
            return no_drafts(len(limits))
        embed_BE = self._target.embed(batch.last_tokens)
        states_BKE = embed_BE.new_zeros((len(limits), self._count, embed_BE.shape[1]))
        for first in range(0, len(rows), self._at_once):
            part = rows[first : first + self._at_once]
            index = torch.from_numpy(part).to(embed_BE.device)
            states_BKE[index] = self._filled(batch.slots[part], batch.lengths[part], masks[part], embed_BE[index])
        ids = []
        for place in range(int(limits.max())):
            logits_BV = self._module.logits(states_BKE[:, place], self._target)
            ids.append(batch.draw(logits_BV.float(), place))
        return limited(ids, limits)

    def draft(self, step: DraftRound) -> torch.Tensor:
        """Return drafts [B, K], each the likeliest in its place, -1 where there is no room."""
        width, longest = step.num_drafts + 1, self._model.max_length
        near_B = torch.minimum(step.kept + 1, longest - 1 - step.starts)
        begun = self._model.recorded(step.slots, step.starts, near_B, width)
        given_TF = torch.cat(list(step.taps), -1).flatten(0, 1)
        self._module.remember(given_TF, begun.positions, Storing(begun.context))
        start_B = step.starts + step.kept + 1
        masks_B = (longest - 1 - start_B).clamp(0, self._count)
        embed_BE, parts = self._target.embed(step.last_tokens), []
        for first in range(0, len(step.slots), self._at_once):
            part = slice(first, first + self._at_once)
            parts.append(self._recorded(step.slots[part], start_B[part], masks_B[part], embed_BE[part]))
        states_TE = torch.cat(parts).flatten(0, 1)
        ids_BK: torch.Tensor = self._module.likeliest(states_TE, self._target).unflatten(0, (-1, self._count))
        room_B = torch.minimum(step.room, masks_B)
        return ids_BK.masked_fill(step.places >= room_B.unsqueeze(1), -1)

    def _filled(self, slots: Ints, lengths: Ints, masks: Ints, embed_RE: torch.Tensor) -> torch.Tensor:
        """Return [R, K, E] the states of masks; of sequences with less than K the last ones again."""
        widths = (masks + 1).astype(np.int32)
        stored = self._model.begin(slots, (lengths - 1).astype(np.int32), widths)
        ends = np.repeat(lengths + masks - 1, widths).astype(np.int32)
        seen = self._model.begin(np.repeat(slots, widths), ends, np.ones(len(ends), dtype=np.int32))
        firsts = np.cumsum(widths) - widths
        embeds_TE = self._mask(embed_RE.device).repeat(len(ends), 1)
        embeds_TE[torch.from_numpy(firsts.astype(np.int64)).to(embed_RE.device)] = embed_RE
        states_TE = self._module(embeds_TE, stored.positions, Redirected(seen.context, stored.context))
        at_RK = firsts[:, None] + np.minimum(1 + np.arange(self._count), masks[:, None])
        filled_RKE: torch.Tensor = states_TE[torch.from_numpy(at_RK.astype(np.int64)).to(embed_RE.device)]
        return filled_RKE

    def _recorded(
        self, slots_R: torch.Tensor, start_R: torch.Tensor, masks_R: torch.Tensor, embed_RE: torch.Tensor
    ) -> torch.Tensor:
        """Return [R, K, E] the states of masks, all of them recorded; those without room are of no use."""
        width = self._count + 1
        stored = self._model.recorded(slots_R, start_R, masks_R + 1, width)
        slots_T, ends_T = (part_R.repeat_interleave(width) for part_R in (slots_R, start_R + masks_R))
        seen = self._model.recorded(slots_T, ends_T, torch.ones_like(ends_T))
        masks_RKE = self._mask(embed_RE.device).expand(len(slots_R), self._count, -1)
        embeds_TE = torch.cat((embed_RE.unsqueeze(1), masks_RKE), 1).flatten(0, 1)
        states_TE = self._module(embeds_TE, stored.positions, Redirected(seen.context, stored.context))
        filled_RKE: torch.Tensor = states_TE.unflatten(0, (-1, width))[:, 1:]
        return filled_RKE

    def _mask(self, device: torch.device) -> torch.Tensor:
        """Return the embedding [1, E] of the mask."""
        embed_1E: torch.Tensor = self._target.embed(torch.full((1,), self._module.config.mask_token, device=device))
        return embed_1E
