"""InputBatch: what the device knows of running sequences, and the inputs of a step computed from it.

A step sends the plan's small arrays and what changed; token ids, positions and cache slots are computed on the device
from the tables. Sampled tokens are written
into the token table there, so the next step needs no token from the host.

Legend: S slots, L longest sequence, M blocks of a sequence, T tokens, B sequences of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import AttentionStep
from jackfield.protocol import NewSequence, SchedulerOutput

Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class StepInputs:
    """Inputs of one step.

    Args:
        ids_T, positions_T: int64. slots_B: int64. query_start: [B + 1] int32. steps: per cache group what attention
        sees.
        ends: [B] on the host: index after each sequence's last token.
    """

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_B: torch.Tensor
    query_start: torch.Tensor
    steps: list[AttentionStep]
    ends: npt.NDArray[np.int64]


class InputBatch:
    """Per-slot tables on the device.

    Args:
        slots: S. max_length: L. block_size: tokens in a block. groups: number of cache groups. device: where.
    """

    def __init__(self, slots: int, max_length: int, block_size: int, groups: int, device: torch.device) -> None:
        blocks = -(-max_length // block_size)
        self.device = device
        self._block_size = block_size
        self.tokens = torch.zeros((slots, max_length + 1), dtype=torch.int32, device=device)
        self._tables = [torch.zeros((slots, blocks), dtype=torch.int32, device=device) for _ in range(groups)]

    @property
    def max_blocks(self) -> int:
        """M."""
        return self._tables[0].shape[1] if self._tables else 0

    def fill(self, new: NewSequence) -> None:
        """Write a new sequence's tokens."""
        self.tokens[new.slot, : len(new.token_ids)] = torch.from_numpy(new.token_ids).to(self.device)

    def write_blocks(self, blocks: list[tuple[Ints, Ints, Ints]]) -> None:
        """Write new block-table entries."""
        for table, (slots, places, ids) in zip(self._tables, blocks, strict=True):
            if len(slots):
                table[self._send(slots), self._send(places)] = torch.from_numpy(ids).to(self.device)

    def prepare(self, plan: SchedulerOutput) -> StepInputs:
        """Return the inputs of a step; ``fill`` and ``write_blocks`` ran before."""
        ends = np.cumsum(plan.counts, dtype=np.int64)
        query_start_host = np.concatenate((np.zeros(1, dtype=np.int32), ends.astype(np.int32)))
        slots_B, starts_B, counts_B = self._send(plan.slots), self._send(plan.starts), self._send(plan.counts)
        query_start = torch.from_numpy(query_start_host).to(self.device)
        total = int(ends[-1])
        if total == len(plan.slots):
            slots_T, positions_T, sequence_T = slots_B, starts_B, torch.arange(total, device=self.device)
        else:
            sequence_T = torch.repeat_interleave(
                torch.arange(len(plan.slots), device=self.device), counts_B, output_size=total
            )
            shift = starts_B - query_start[:-1]
            positions_T = torch.arange(total, device=self.device) + shift[sequence_T]
            slots_T = slots_B[sequence_T]
        ids_T = self.tokens[slots_T, positions_T].long()
        lengths_host = plan.starts + plan.counts
        steps = []
        for table in self._tables:
            block_table = table[slots_B]
            pages = block_table[sequence_T, positions_T // self._block_size].long()
            steps.append(
                AttentionStep(
                    num_tokens=total,
                    num_sequences=len(plan.slots),
                    num_decodes=int((plan.counts == 1).sum()),
                    max_query=int(plan.counts.max()),
                    max_length=int(lengths_host.max()),
                    query_start=query_start,
                    lengths=(starts_B + counts_B).int(),
                    block_table=block_table,
                    slots=pages * self._block_size + positions_T % self._block_size,
                    positions=positions_T,
                    query_start_host=query_start_host,
                    lengths_host=lengths_host,
                )
            )
        return StepInputs(ids_T, positions_T, slots_B, query_start, steps, ends)

    def write_drafts(self, plan: SchedulerOutput) -> None:
        """Write the drafts to be verified behind each sequence's known tokens."""
        if plan.drafts is None or plan.num_drafts is None or not plan.num_drafts.any():
            return
        known = plan.starts + plan.counts - plan.num_drafts
        rows, places = np.nonzero(np.arange(plan.drafts.shape[1]) < plan.num_drafts[:, None])
        slots, at = plan.slots[rows], known[rows] + places
        self.tokens[self._send(slots), self._send(at)] = torch.from_numpy(plan.drafts[rows, places]).to(self.device)

    def _send(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)
