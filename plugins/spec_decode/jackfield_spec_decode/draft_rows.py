"""Drafts of many sequences that have unlike numbers of them. Legend: B sequences, K drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import Drafts


def no_drafts(count: int) -> Drafts:
    """Return none for ``count`` sequences."""
    return Drafts(np.full((count, 1), -1, dtype=np.int32))


def places(firsts: npt.NDArray[Any], sizes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the places of rows that begin at ``firsts`` and are ``sizes`` long, one row after another."""
    rows = [np.arange(at, at + size, dtype=np.int64) for at, size in zip(firsts, sizes, strict=True)]
    return np.concatenate(rows)


def rows_of(slots: npt.NDArray[Any], known: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return where each slot is among those that are known, -1 where it is not."""
    place = {slot: at for at, slot in enumerate(known.tolist())}
    return np.array([place.get(slot, -1) for slot in slots.tolist()], dtype=np.int64)


def limited(ids: Sequence[torch.Tensor], limits_B: npt.NDArray[Any]) -> Drafts:
    """Return drafts, each [B], place after place, without those past each sequence's limit: nobody computed them."""
    ids_BK = torch.stack(list(ids), 1)
    limits = torch.from_numpy(limits_B.astype(np.int64)).to(ids_BK.device)
    past_BK = torch.arange(len(ids), device=ids_BK.device) >= limits.unsqueeze(1)
    return Drafts(ids_BK.masked_fill(past_BK, -1))
