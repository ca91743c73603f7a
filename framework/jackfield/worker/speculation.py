"""Verification of drafts, and drafting for the next step. Legend: R rows that sample, K drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from jackfield.interfaces import DraftBatch, Drafter
from jackfield.protocol import SchedulerOutput

Ints = npt.NDArray[np.int32]


def verify(
    plan: SchedulerOutput,
    rows: npt.NDArray[np.int64],
    drafts: Ints,
    owner: npt.NDArray[np.int64],
    within: npt.NDArray[np.int64],
    ids: npt.NDArray[Any],
) -> tuple[Ints, npt.NDArray[np.int64]]:
    """Return tokens [R, 1 + K] (-1 behind the last that counts) and how many drafts of each row were kept.

    Drafts are kept as long as each equals what the target sampled in its place. For drafts that are certain (point
    masses) this keeps the target's distribution exactly: a draft d is kept with probability p(d), and otherwise the
    token that comes out follows p restricted to the others.

    Args:
        rows: [R] sequences of the plan that sample. drafts: [R] drafts each had. owner, within: for every sampled
            position its row and place. ids: sampled token of every position.
    """
    width = 1 + (plan.drafts.shape[1] if plan.drafts is not None else 0)
    tokens = np.full((len(rows), width), -1, dtype=np.int32)
    tokens[owner, within] = ids
    if plan.drafts is None:
        return tokens, np.zeros(len(rows), dtype=np.int64)
    place = np.arange(width - 1)
    equal = (tokens[:, :-1] == plan.drafts[rows]) & (place < drafts[:, None])
    accepted = np.cumprod(equal, axis=1).sum(axis=1)
    tokens[np.arange(width) > accepted[:, None]] = -1
    return tokens, accepted


def propose(
    drafter: Drafter,
    slots: Ints,
    lengths: Ints,
    token_ids: npt.NDArray[np.int32],
    *,
    width: int,
    max_length: int,
    vocab_size: int,
) -> Ints:
    """Return drafts [R, width], cut at the first illegal id and at each row's limit.

    Args:
        slots: [R]. lengths: [R] tokens of each sequence now. token_ids: host view of the token table.
    """
    limits = np.clip(max_length - lengths, 0, width)
    ids = np.asarray(drafter.propose(DraftBatch(slots, token_ids, lengths, limits)).ids, dtype=np.int32)
    drafts = np.full((len(ids), width), -1, dtype=np.int32)
    drafts[:, : ids.shape[1]] = ids[:, :width]
    legal = (drafts >= 0) & (drafts < vocab_size) & (np.arange(width) < limits[:, None])
    drafts[np.cumprod(legal, axis=1) == 0] = -1
    return drafts
