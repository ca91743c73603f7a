"""InputBatch: what the device knows of running sequences, and the inputs of a step computed from it.

A step sends the plan's small arrays and what changed; token ids, positions and cache slots are computed on the device
from the tables. Sampled tokens are written into the token table there, so the next step needs no token from the host.

Legend: S slots, L longest sequence, M blocks of a sequence, T tokens, B sequences of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import AttentionStep, DraftTree, TokenInputs
from jackfield.kv_cache import CacheGroup
from jackfield.layers.functional import REFERENCES
from jackfield.protocol import NewSequence, SchedulerOutput
from jackfield.worker.transfer import Transfer
from jackfield.worker.trees import send_tree, step_tree

Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class StepInputs:
    """Inputs of one step.

    Args:
        taps: what layers gave that were asked for, once the model ran.
        ids_T, positions_T: int64. steps: per cache group what attention sees. ends: [B] on the host: index after each
            sequence's last token. types_T: int64, or None where the model has no token types. next_T: int64, what
            stands behind each token, where all sequences have as many.
    """

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    steps: list[AttentionStep]
    ends: npt.NDArray[np.int64]
    types_T: torch.Tensor | None = None
    taps: Mapping[int, torch.Tensor] = field(default_factory=dict)
    next_T: torch.Tensor | None = None


class InputBatch:
    """Per-slot tables on the device. One slot more than asked for serves the padding rows of recorded graphs: its
    tokens and blocks stay 0, so that they read and write the null block.

    Args:
        slots: S. max_length: L. block_size: tokens in a block. groups: cache groups. transfer: to the device.
        typed: whether tokens have types. ops: of recorded steps, by name.
    """

    def __init__(
        self,
        slots: int,
        max_length: int,
        block_size: int,
        groups: Sequence[CacheGroup],
        transfer: Transfer,
        *,
        typed: bool = False,
        ops: Mapping[str, Callable[..., Any]] = REFERENCES,
    ) -> None:
        blocks = -(-max_length // block_size)
        device = transfer.device
        self.padding_slot = slots
        self._transfer = transfer
        self._block_size = block_size
        self._max_length = max_length
        self.tokens = torch.zeros((slots + 1, max_length + 1), dtype=torch.int32, device=device)
        self.known = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        """[S] how many tokens recorded steps left of each sequence."""
        self._types = torch.zeros_like(self.tokens) if typed else None
        self._states = [group.is_state for group in groups]
        self._ops = ops
        self._starts: dict[tuple[int, int], torch.Tensor] = {}
        self._tables = [torch.zeros((slots + 1, blocks), dtype=torch.int32, device=device) for _ in groups]

    @property
    def max_blocks(self) -> int:
        """M."""
        return self._tables[0].shape[1] if self._tables else 0

    def fill(self, new: Sequence[NewSequence]) -> None:
        """Write new sequences' tokens, all in one transfer."""
        if not new:
            return
        lengths = np.array([len(n.token_ids) for n in new])
        slots = np.repeat([n.slot for n in new], lengths)
        places = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        self.write_tokens(slots, places, np.concatenate([n.token_ids for n in new]))
        if self._types is not None:
            send = self._transfer.send_index
            types = np.concatenate([_types(n) for n in new])
            self._types[send(slots), send(places)] = self._transfer.send(types)

    def write_tokens(self, slots: npt.NDArray[np.integer], places: npt.NDArray[np.integer], ids: Ints) -> None:
        """Write token ids that the host knows."""
        send = self._transfer.send_index
        self.tokens[send(slots), send(places)] = self._transfer.send(ids)

    def write_blocks(self, blocks: list[tuple[Ints, Ints, Ints]]) -> None:
        """Write new block-table entries."""
        send = self._transfer.send_index
        for table, (slots, places, ids) in zip(self._tables, blocks, strict=True):
            if len(slots):
                table[send(slots), send(places)] = self._transfer.send(ids)

    def write_drafts(self, plan: SchedulerOutput) -> None:
        """Write the drafts to be verified behind each sequence's known tokens."""
        if plan.drafts is None or plan.num_drafts is None or not plan.num_drafts.any():
            return
        known = plan.starts + plan.counts - plan.num_drafts
        rows, places = np.nonzero(np.arange(plan.drafts.shape[1]) < plan.num_drafts[:, None])
        self.write_tokens(plan.slots[rows], known[rows] + places, plan.drafts[rows, places])

    def prepare(self, plan: SchedulerOutput, tree: DraftTree | None = None) -> StepInputs:
        """Return the inputs of a step; ``fill`` and ``write_blocks`` ran before. ``tree``: what tokens see, where the
        plan does not say it.
        """
        tree = tree or step_tree(plan)
        device, total = self._transfer.device, plan.num_tokens
        ends = np.cumsum(plan.counts, dtype=np.int64)
        query_start_host = np.concatenate((np.zeros(1, dtype=np.int32), ends.astype(np.int32)))
        slots_B, starts_B, counts_B = self._transfer.send_index(np.stack((plan.slots, plan.starts, plan.counts)))
        query_start = self._transfer.send(query_start_host)
        if total == len(plan.slots):
            slots_T, places_T, sequence_T = slots_B, starts_B, None
        else:
            sequence_T = torch.repeat_interleave(
                torch.arange(len(plan.slots), device=device), counts_B, output_size=total
            )
            shift = starts_B - query_start[:-1]
            places_T = torch.arange(total, device=device) + shift[sequence_T]
            slots_T = slots_B[sequence_T]
        ids_T = self.tokens[slots_T, places_T].long()
        mask = None if tree is None else send_tree(tree, self._transfer)
        positions_T = places_T if tree is None else self._transfer.send(tree.positions)
        lengths, lengths_host = (starts_B + counts_B).int(), plan.starts + plan.counts
        steps = []
        for table, is_state in zip(self._tables, self._states, strict=True):
            block_table = table[slots_B]
            steps.append(
                AttentionStep(
                    num_tokens=total,
                    num_sequences=len(plan.slots),
                    num_decodes=int((plan.counts == 1).sum()),
                    max_query=int(plan.counts.max()),
                    max_length=int(lengths_host.max()),
                    query_start=query_start,
                    lengths=lengths,
                    block_table=block_table,
                    slots=places_T if is_state else self._cache_slots(block_table, sequence_T, places_T),
                    positions=positions_T,
                    query_start_host=query_start_host,
                    lengths_host=lengths_host,
                    states=self._state_pages(block_table, starts_B, lengths) if is_state else None,
                    tree=mask,
                )
            )
        types_T = None if self._types is None else self._types[slots_T, places_T].long()
        return StepInputs(ids_T, positions_T, steps, ends, types_T)

    def prepare_uniform(
        self,
        slots_B: torch.Tensor,
        starts_B: torch.Tensor,
        counts_B: torch.Tensor | None = None,
        width: int = 1,
        shift: int = 0,
    ) -> StepInputs:
        """Return the inputs of a step with N = ``width`` new tokens for each sequence, from device tensors alone.

        Pure device work with no sizes that depend on data, so that it can be recorded into a graph.

        Args:
            starts_B: position of each sequence's first new token. counts_B: how many of its tokens count; the others
                are computed and not kept. None: all. shift: begin so many tokens later, with so many fewer that count.
        """
        count = len(slots_B)
        host = np.arange(count + 1, dtype=np.int32) * width
        bounds, query_start = np.full(count, self._max_length, dtype=np.int32), self._query_start(count, width)
        ids_T = positions_T = next_T = slots_B
        steps = []
        for table, is_state in zip(self._tables, self._states, strict=True):
            found: TokenInputs = self._ops["token_inputs"](
                self.tokens, table, slots_B, starts_B, counts_B, width, self._block_size, shift
            )
            ids_T, positions_T, next_T = found.ids, found.positions, found.next_ids
            steps.append(
                AttentionStep(
                    num_tokens=count * width,
                    num_sequences=count,
                    num_decodes=count if width == 1 else 0,
                    max_query=width,
                    max_length=self._max_length,
                    query_start=query_start,
                    lengths=found.lengths,
                    block_table=found.table,
                    slots=found.positions if is_state else found.slots,
                    positions=found.positions,
                    query_start_host=host,
                    lengths_host=bounds,
                    states=self._state_pages(found.table, starts_B, found.lengths) if is_state else None,
                )
            )
        return StepInputs(ids_T, positions_T, steps, host[1:].astype(np.int64), next_T=next_T)

    def _query_start(self, count: int, width: int) -> torch.Tensor:
        """Return where each sequence's tokens begin; made once, so that no recording has to."""
        known = self._starts.get((count, width))
        if known is None:
            stop = count * width + 1
            known = torch.arange(0, stop, width, dtype=torch.int32, device=self.tokens.device)
            self._starts[count, width] = known
        return known

    def _state_pages(self, table_BM: torch.Tensor, starts_B: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """Return [B, 2]: the page with the state before the step (-1 where there is none yet), and that for after."""
        last_B2 = torch.stack((starts_B, lengths_B), 1) - 1
        pages_B2 = table_BM.gather(1, (last_B2.clamp(min=0) // self._block_size).long())
        return torch.where(last_B2 < 0, -1, pages_B2)

    def _cache_slots(
        self, block_table: torch.Tensor, sequence_T: torch.Tensor | None, positions_T: torch.Tensor
    ) -> torch.Tensor:
        blocks = positions_T // self._block_size
        if sequence_T is None:
            pages = block_table.gather(1, blocks.unsqueeze(1)).squeeze(1)
        else:
            pages = block_table[sequence_T, blocks]
        return pages.long() * self._block_size + positions_T % self._block_size


def _types(new: NewSequence) -> Ints:
    if new.token_types is None:
        return np.zeros(len(new.token_ids), dtype=np.int32)
    return np.array(new.token_types, dtype=np.int32)
