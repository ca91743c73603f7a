"""What tokens see of places in the cache where drafts branch, on the host.

Legend: N tokens, L places.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from jackfield.interfaces import MOST_BRANCHES, AttentionStep, TreeMask

Ints = npt.NDArray[np.int64]


def tree_cells(
    step: AttentionStep, tree: TreeMask, sequences_N: Ints, tokens_N: Ints, places_NL: Ints
) -> tuple[npt.NDArray[np.bool_], Ints]:
    """Return [N, L] whether a token sees what its sequence has stored at a place, and the position of that in the text.

    Args:
        step, tree: of which ``tokens_N`` are tokens and ``sequences_N`` their sequences. places_NL: places; one line
            may stand for all tokens.
    """
    shift = places_NL - tree.base_host[tokens_N].astype(np.int64)[:, None]
    bits = tree.bits_host[tokens_N][:, None] >> np.clip(shift, 0, MOST_BRANCHES - 1)
    seen = (shift < 0) | ((shift < MOST_BRANCHES) & (bits & 1 > 0))
    return seen, text_positions(step, tree, sequences_N, places_NL)


def bits_in_windows(step: AttentionStep, tree: TreeMask, first_seen_T: Ints) -> Ints:
    """Return ``TreeMask.bits`` [T] without ancestors in front of the first position that each token sees."""
    starts = step.query_start_host.astype(np.int64)
    sequences = np.repeat(np.arange(step.num_sequences), np.diff(starts))
    drafts = np.bincount(sequences[tree.bits_host != 0], minlength=step.num_sequences)
    ends = starts[1:][sequences][:, None]
    # Bit i is the i-th draft, and drafts are a sequence's last tokens.
    token = np.minimum(ends - drafts[sequences][:, None] + np.arange(MOST_BRANCHES), ends - 1)
    inside = tree.positions_host[token] >= first_seen_T[:, None]
    kept: Ints = tree.bits_host & (inside.astype(np.int64) << np.arange(MOST_BRANCHES)).sum(1)
    return kept


def text_positions(step: AttentionStep, tree: TreeMask, sequences_N: Ints, places_NL: Ints) -> Ints:
    """Return [N, L] positions in the text of what is stored at places: of old tokens the places themselves."""
    assert step.lengths_host is not None
    starts = step.query_start_host.astype(np.int64)
    counts = np.diff(starts)[sequences_N][:, None]
    within = places_NL - (step.lengths_host[sequences_N].astype(np.int64)[:, None] - counts)
    new = (within >= 0) & (within < counts)
    token: Any = np.where(new, starts[sequences_N][:, None] + within, 0)
    return np.where(new, tree.positions_host[token], places_NL)
