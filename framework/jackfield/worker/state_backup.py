"""Recurrent states from before drafts, to go back to where drafts were refused.

A step writes a state over the one it read, wherever both are of one block. So states of sequences with drafts are
copied to pages of their own before the step, and back where a draft was refused: the sequence then computes its tokens
again from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from jackfield.kv_cache import CacheGroup
from jackfield.protocol import SchedulerOutput
from jackfield.worker.input_batch import StepInputs


def backup_pages(groups: Sequence[CacheGroup], slots: int) -> int:
    """Return how many pages backups need: one for each sequence and group with states."""
    return slots * sum(group.is_state for group in groups)


class StateBackup:
    """Copies of states.

    Args:
        groups: all cache groups. caches: planes by layer, with :func:`backup_pages` pages behind the ``first``.
        slots: sequences that run at once.
    """

    def __init__(
        self, groups: Sequence[CacheGroup], caches: Mapping[int, Mapping[str, torch.Tensor]], first: int, slots: int
    ) -> None:
        states = [at for at, group in enumerate(groups) if group.is_state]
        self._planes = {at: [p for layer in groups[at].layers for p in caches[layer].values()] for at in states}
        self._first = {at: first + number * slots for number, at in enumerate(states)}
        self._saved: dict[int, torch.Tensor] = {}
        self._rows: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def save(self, plan: SchedulerOutput, inputs: StepInputs) -> None:
        """Copy the states that sequences with drafts begin the step with."""
        drafts = plan.num_drafts
        self._rows = np.flatnonzero(drafts) if drafts is not None else self._rows[:0]
        if not len(self._rows):
            return
        for at, planes in self._planes.items():
            pages = inputs.steps[at].states
            assert pages is not None, "groups with states have their pages"
            rows = torch.from_numpy(self._rows).to(pages.device)
            self._saved[at] = pages[rows, 0].long()
            self._copy(planes, self._saved[at], self._own(at, plan.slots[self._rows], pages.device))

    def restore(self, plan: SchedulerOutput, refused: npt.NDArray[np.int64]) -> None:
        """Copy them back for the sequences (rows of the plan) that had a draft refused."""
        back = np.flatnonzero(np.isin(self._rows, refused))
        if not len(back):
            return
        for at, planes in self._planes.items():
            device = self._saved[at].device
            own = self._own(at, plan.slots[self._rows[back]], device)
            self._copy(planes, own, self._saved[at][torch.from_numpy(back).to(device)])

    def _own(self, at: int, slots: npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
        return torch.from_numpy(self._first[at] + slots.astype(np.int64)).to(device)

    @staticmethod
    def _copy(planes: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor) -> None:
        for plane in planes:
            plane[target] = plane[source]
