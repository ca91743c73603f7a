"""Prompt lookup on the device, without an index: a look at all of a text costs little there, and needs no host.

Legend: B sequences, L longest text, K drafts.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def last_matches(
    tokens_BL: torch.Tensor, lengths_B: torch.Tensor, shortest: int, longest: int, num_drafts: int
) -> torch.Tensor:
    """Return drafts [B, K] int64: what followed the most recent earlier occurrence of the longest suffix that has one;
    -1 where none has. The same as :class:`jackfield_spec_decode.ngram_index.NgramIndex` finds.

    Args:
        tokens_BL: integers; what lies behind a text does not matter. lengths_B: int64, at least 1. shortest, longest:
            sizes of the suffixes.
    """
    ends_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    lengths_B1 = lengths_B.unsqueeze(1)
    # Of each place: how many tokens in front of it are those at the end of the text.
    run_BL, size_BL = (ends_L > 0) & (ends_L < lengths_B1), torch.zeros_like(ends_L)
    for back in range(1, longest + 1):
        word_B1 = tokens_BL.gather(1, (lengths_B1 - back).clamp(min=0))
        before_BL = pad(tokens_BL, (back, 0), value=-1)[:, : tokens_BL.shape[1]]
        run_BL = run_BL & (before_BL == word_B1) & (lengths_B1 >= back)
        size_BL = size_BL + run_BL
    rank_BL = torch.where(size_BL >= shortest, size_BL * len(ends_L) + ends_L, 0)
    best_B1 = rank_BL.argmax(1, keepdim=True)
    found_B1 = rank_BL.gather(1, best_B1) > 0
    # A match that reaches into itself is a loop: what follows it goes on with what was just proposed.
    place_K = torch.arange(num_drafts, device=tokens_BL.device)
    next_BK = tokens_BL.gather(1, best_B1 + place_K % (lengths_B1 - best_B1)).long()
    return torch.where(found_B1, next_BK, -1)
