"""A draft model beside the target: its layers keep their keys and values in the blocks of the target's sequences.

Legend: B sequences, T tokens, E width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from jackfield.interfaces import DraftPass, DraftTree, MetadataBuilder, RecordedPass
from jackfield.kv_cache import CacheGroup
from jackfield.kv_cache.groups import Retention
from jackfield.protocol import SchedulerOutput
from jackfield.worker.build import AttentionChoice, WorkerSpec
from jackfield.worker.context import StepContext
from jackfield.worker.input_batch import InputBatch

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class JointLayout:
    """Cache groups of target and draft model.

    Args:
        groups: the target's first. places: by attention choice of the draft model, whose block table it uses.
        offset: number of the draft model's first layer among all.
    """

    groups: tuple[CacheGroup, ...]
    places: Mapping[str, int]
    offset: int


def join(groups: Sequence[CacheGroup], draft: Sequence[AttentionChoice]) -> JointLayout:
    """Return the groups with the draft model's layers in them.

    Where the target has a group that keeps everything, the draft's layers are in its blocks: they cost their own bytes
    and nothing else. Otherwise they have groups of their own, which keep everything.
    """
    joint = list(groups)
    offset = 1 + max((layer for group in groups for layer in group.layers), default=-1)
    whole = next((at for at, group in enumerate(groups) if group.keeps is Retention.FULL), None)
    places = {}
    for choice in draft:
        layers = tuple(offset + layer for layer in choice.layers)
        specs = (choice.spec,) * len(layers)
        if whole is None:
            places[choice.name] = len(joint)
            joint.append(CacheGroup(choice.name, layers, specs, retention=Retention.FULL))
            continue
        group = joint[whole]
        joint[whole] = replace(group, layers=group.layers + layers, specs=group.specs + specs)
        places[choice.name] = whole
    return JointLayout(tuple(joint), places, offset)


class Vocabularies:
    """Ids of the target and of the draft model.

    Args:
        size: rows of the draft model's vocabulary. target_size: V. ids: [size] the target's id of each, -1 where it has
            none; None where ids are the same and only padding differs.
    """

    def __init__(self, size: int, target_size: int, ids: npt.NDArray[np.int32] | None, device: torch.device) -> None:
        self._size, self._target_size, self._shared = size, target_size, None
        if ids is None:
            return
        shared = np.flatnonzero((ids >= 0) & (ids < target_size))
        self._shared = torch.from_numpy(shared).to(device)
        self._targets = torch.from_numpy(ids[shared].astype(np.int64)).to(device)
        # Tokens that the draft model does not know are its token 0: it cannot be told what was said there.
        self._drafts = torch.zeros(target_size, dtype=torch.int64, device=device)
        self._drafts[self._targets] = self._shared

    def to_draft(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return the draft model's ids of tokens of the target."""
        return ids_T.clamp(max=self._size - 1) if self._shared is None else self._drafts[ids_T]

    def to_target(self, logits_BD: torch.Tensor) -> torch.Tensor:
        """Return logits [B, V] over the target's vocabulary, float32."""
        logits_BD = logits_BD.float()
        if self._shared is None:
            rest = self._target_size - logits_BD.shape[1]
            return pad(logits_BD, (0, rest), value=float("-inf")) if rest else logits_BD
        logits_BV = logits_BD.new_full((len(logits_BD), self._target_size), float("-inf"))
        logits_BV[:, self._targets] = logits_BD[:, self._shared]
        return logits_BV


class PagedDraftModel:
    """Implements :class:`jackfield.interfaces.DraftModel`.

    Args:
        model: built and loaded. spec: the draft's. batch: the target's tables. layout: where its layers are. builders:
            of its attention choices. caches: planes by layer, those of the target too. vocab_size: of the target.
    """

    def __init__(
        self,
        model: Any,
        spec: WorkerSpec,
        batch: InputBatch,
        layout: JointLayout,
        builders: Mapping[str, MetadataBuilder],
        caches: Mapping[int, Mapping[str, torch.Tensor]],
        vocab_size: int,
    ) -> None:
        self._batch, self._builders, self._places = batch, builders, layout.places
        self._caches = {layer - layout.offset: planes for layer, planes in caches.items() if layer >= layout.offset}
        self.module = model
        self.max_tokens = spec.max_num_batched_tokens
        self._vocabulary = Vocabularies(spec.model_config.vocab_size, vocab_size, spec.vocabulary, batch.tokens.device)
        self.max_length = min(spec.model_config.max_position, spec.max_model_len)

    def run(self, slots: Ints, starts: Ints, counts: Ints, ids: torch.Tensor | None = None) -> torch.Tensor:
        """See DraftModel."""
        if int(counts.sum()) <= self.max_tokens:
            return self._pass(slots, starts, counts, ids)
        starts, left = starts.copy(), counts.copy()
        last_BE: torch.Tensor | None = None
        while left.any():
            now = np.clip(self.max_tokens - np.concatenate(([0], np.cumsum(left)[:-1])), 0, left).astype(np.int32)
            rows = np.flatnonzero(now)
            hidden_RE = self._pass(slots[rows], starts[rows], now[rows], None)
            if last_BE is None:
                last_BE = hidden_RE.new_zeros((len(slots), hidden_RE.shape[1]))
            last_BE[torch.from_numpy(rows).to(hidden_RE.device)] = hidden_RE
            starts, left = starts + now, left - now
        assert last_BE is not None, "there is at least one token"
        return last_BE

    def begin(self, slots: Ints, starts: Ints, counts: Ints, tree: DraftTree | None = None) -> DraftPass:
        """See DraftModel."""
        # Backends are promised that sequences with one new token go first.
        order = np.argsort(counts != 1, kind="stable")
        plan = SchedulerOutput(
            -1, slots[order], starts[order].astype(np.int32), counts[order], np.ones(len(slots), dtype=np.bool_)
        )
        inputs = self._batch.prepare(plan, tree)
        steps = {name: inputs.steps[place] for name, place in self._places.items()}
        metadata = {name: self._builders[name].build(step) for name, step in steps.items()}
        context = StepContext(self._caches, metadata, {name: step.slots for name, step in steps.items()})
        rows_T = torch.from_numpy(np.repeat(plan.slots, plan.counts).astype(np.int64)).to(inputs.ids_T.device)
        next_T = self._batch.tokens[rows_T, inputs.positions_T + 1].long()
        return DraftPass(order, inputs.positions_T, inputs.ids_T, next_T, inputs.ends, context)

    def recorded(
        self, slots_B: torch.Tensor, starts_B: torch.Tensor, counts_B: torch.Tensor, width: int = 1, shift: int = 0
    ) -> RecordedPass:
        """See DraftModel."""
        inputs = self._batch.prepare_uniform(slots_B, starts_B, counts_B, width, shift)
        steps = {name: inputs.steps[place] for name, place in self._places.items()}
        metadata = {name: self._builders[name].build(step) for name, step in steps.items()}
        context = StepContext(self._caches, metadata, {name: step.slots for name, step in steps.items()})
        assert inputs.next_T is not None, "all sequences have as many tokens"
        return RecordedPass(inputs.positions_T, inputs.ids_T, inputs.next_T, context)

    def logits(self, hidden_BE: torch.Tensor) -> torch.Tensor:
        """See DraftModel."""
        return self._vocabulary.to_target(self.module.logits(hidden_BE))

    def _pass(self, slots: Ints, starts: Ints, counts: Ints, ids: torch.Tensor | None) -> torch.Tensor:
        """Return [B, E] the last hidden states of one forward pass."""
        prepared = self.begin(slots, starts, counts)
        tokens_T = prepared.ids
        if ids is not None:
            tokens_T = ids[torch.from_numpy(prepared.order).to(ids.device)]
        hidden_TE = self.module.embed(self._vocabulary.to_draft(tokens_T))
        hidden_TE = self.module.forward(hidden_TE, prepared.positions, prepared.context)
        back = (prepared.ends - 1)[np.argsort(prepared.order)]
        last_BE: torch.Tensor = hidden_TE[torch.from_numpy(back).to(hidden_TE.device)]
        return last_BE
