"""Drafts that branch: what they see of one another, and which of them are left where some cannot be.

Parents come before children: a draft's parent is an index below its own, or -1 for the last known token.

Legend: B sequences, K drafts, T tokens of a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from jackfield.interfaces import DraftTree, TreeMask
from jackfield.protocol import SchedulerOutput
from jackfield.worker.transfer import Transfer

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


def send_tree(tree: DraftTree, transfer: Transfer) -> TreeMask:
    """Return the mask that attention is given."""
    return TreeMask(transfer.send(tree.base), transfer.send(tree.bits), tree.base, tree.bits, tree.positions)


def depths(parents_BK: Ints) -> Ints:
    """Return [B, K] how deep each draft is, from 1 on."""
    found, rows = np.ones_like(parents_BK), np.arange(len(parents_BK))
    for index in range(1, parents_BK.shape[1]):
        parent = parents_BK[:, index]
        found[:, index] += np.where(parent >= 0, found[rows, parent], 0)
    return found


def ancestors(parents_BK: Ints) -> Longs:
    """Return [B, K] a bit for each draft's ancestors and itself, bit i being draft i; K is at most 63."""
    rows = np.arange(len(parents_BK))
    found = np.ones(parents_BK.shape, dtype=np.int64) << np.arange(parents_BK.shape[1], dtype=np.int64)
    for index in range(1, parents_BK.shape[1]):
        parent = parents_BK[:, index]
        found[:, index] |= np.where(parent >= 0, found[rows, parent], 0)
    return found


def step_tree(plan: SchedulerOutput) -> DraftTree | None:
    """Return what the tokens of a plan see, or None where no drafts branch."""
    if plan.draft_parents is None or plan.num_drafts is None:
        return None
    sequence = np.repeat(np.arange(len(plan.slots)), plan.counts)
    firsts = np.cumsum(plan.counts) - plan.counts
    place = plan.starts[sequence] + np.arange(len(sequence)) - firsts[sequence]
    known = (plan.starts + plan.counts - plan.num_drafts)[sequence]
    draft = place - known
    is_draft, index = draft >= 0, np.clip(draft, 0, None)
    deep = depths(plan.draft_parents)[sequence, index]
    bits = ancestors(plan.draft_parents)[sequence, index]
    return DraftTree(
        np.where(is_draft, known, place + 1).astype(np.int32),
        np.where(is_draft, bits, 0),
        np.where(is_draft, known - 1 + deep, place).astype(np.int64),
    )


def chains(rows: int, width: int) -> Ints:
    """Return [rows, width] the parents of drafts that each follow the one before."""
    return np.broadcast_to(np.arange(-1, width - 1, dtype=np.int32), (rows, width))


def checked_parents(given: Any, shape: tuple[int, ...]) -> Ints:
    """Return parents [B, K] as a drafter gave them.

    Raises:
        TypeError: they are no integers of that shape. ValueError: a parent does not come before its child.
    """
    parents = np.asarray(given.cpu() if hasattr(given, "cpu") else given)
    if parents.shape != shape or not np.issubdtype(parents.dtype, np.integer):
        raise TypeError(f"parents of drafts are integers {list(shape)}, not {parents.dtype} {list(parents.shape)}")
    if (parents < -1).any() or (parents >= np.arange(shape[1])).any():
        raise ValueError("the parent of a draft comes before it, or is -1")
    return parents.astype(np.int32)


def first_paths(parents_BK: Ints) -> npt.NDArray[np.bool_]:
    """Return [B, K] which drafts lie on the path of first children: the last token's, its first child, and so on."""
    found, last = np.zeros(parents_BK.shape, dtype=np.bool_), np.full(len(parents_BK), -1)
    for index in range(parents_BK.shape[1]):
        next_one = parents_BK[:, index] == last
        found[:, index] = next_one
        last = np.where(next_one, index, last)
    return found


def pruned(ids_BK: Ints, parents_BK: Ints, kept_BK: npt.NDArray[np.bool_]) -> tuple[Ints, Ints, npt.NDArray[np.int64]]:
    """Return ids and parents of the drafts that are kept, in front and -1 behind them, and [B, K] which drafts they
    were. A draft whose parent is not kept is not kept either.
    """
    rows, kept_BK = np.arange(len(ids_BK)), kept_BK.copy()
    for index in range(ids_BK.shape[1]):
        parent = parents_BK[:, index]
        kept_BK[:, index] &= (parent < 0) | kept_BK[rows, parent]
    order = np.argsort(~kept_BK, axis=1, kind="stable")
    place = np.argsort(order, axis=1)
    ids = np.where(np.take_along_axis(kept_BK, order, 1), np.take_along_axis(ids_BK, order, 1), -1)
    parents = np.take_along_axis(parents_BK, order, 1)
    moved = np.where(parents >= 0, np.take_along_axis(place, parents.clip(min=0).astype(np.int64), 1), -1)
    behind = np.arange(ids.shape[1]) - 1
    return ids.astype(np.int32), np.where(ids >= 0, moved, behind).astype(np.int32), order
