"""The texts that a drafter on the host reads. Legend: R sequences, N tokens of each, S slots, L longest text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from jackfield.protocol import NewSequence

Ints = npt.NDArray[np.int32]


class HostTexts:
    """A table of tokens by slot, which is told of every token; or, where it is seldom read, one that looks at the
    device's.

    Args:
        slots: S. length: L.
    """

    def __init__(self, slots: int, length: int) -> None:
        self._tokens: Ints = np.zeros((slots, length), dtype=np.int32)
        self._known = np.zeros(slots, dtype=np.int64)
        self._source: torch.Tensor | None = None

    def read_from(self, tokens: torch.Tensor) -> None:
        """Look at the device's table [S, L] from now on, and be told of nothing."""
        self._source = tokens

    @property
    def told(self) -> bool:
        """Whether it must be told of tokens."""
        return self._source is None

    def fill(self, new: Sequence[NewSequence]) -> None:
        """Take the tokens of sequences that got a slot."""
        for one in new if self.told else ():
            self._tokens[one.slot, : len(one.token_ids)] = one.token_ids
            self._known[one.slot] = len(one.token_ids)

    def add(self, slots_R: Ints, ids_R: Ints) -> None:
        """Take a token of each sequence."""
        self._tokens[slots_R, self._known[slots_R]] = ids_R
        self._known[slots_R] += 1

    def extend(self, slots_R: Ints, ids_RN: Ints) -> None:
        """Take tokens of each sequence, -1 behind the last."""
        # A round that was launched ahead does not say where its sequences stand: results come in order.
        row, place = np.nonzero(ids_RN >= 0)
        slots = slots_R[row]
        self._tokens[slots, self._known[slots] + place] = ids_RN[row, place]
        self._known[slots_R] += (ids_RN >= 0).sum(1)

    def view(self, slots_R: Ints) -> Ints:
        """Return [S, L] the table, in which the texts of some slots are right; nobody may write to it."""
        if self._source is not None:
            index = torch.from_numpy(slots_R.astype(np.int64)).to(self._source.device)
            self._tokens[slots_R] = self._source[index].cpu().numpy()
        view = self._tokens.view()
        view.flags.writeable = False
        return view
