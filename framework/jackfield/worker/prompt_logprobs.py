"""Log probabilities of prompt tokens, a few rows at a time: never a prompt × vocabulary tensor.

Legend: T tokens, E width, V vocabulary, N prompt tokens scored in this step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from jackfield.protocol import SchedulerOutput
from jackfield.protocol.requests import TokenLogprobs
from jackfield.sampling import SamplingState
from jackfield.sampling.logprobs import token_logprobs

ROWS = 64
"""Rows of logits that exist at once."""


def score_prompts(
    plan: SchedulerOutput,
    hidden_TE: torch.Tensor,
    ends: np.ndarray[tuple[int], np.dtype[np.int64]],
    tokens: torch.Tensor,
    state: SamplingState,
    logits: Callable[[torch.Tensor], torch.Tensor],
    *,
    as_logits: bool = False,
) -> dict[int, list[TokenLogprobs]] | None:
    """Return, by slot, scores of the prompt tokens that this step's positions predict; None when nobody asked.

    Args:
        plan: the step. hidden_TE: final hidden states. ends: index after each sequence's last token. tokens: the token
            table. state: who asked. logits: from hidden states to [N, V]. as_logits: give logits instead of log
            probabilities.
    """
    asking = np.flatnonzero(state.prompt_logprobs[plan.slots] > -2)
    if not len(asking):
        return None
    found: dict[int, list[TokenLogprobs]] = {}
    for row in asking.tolist():
        slot, start, count = int(plan.slots[row]), int(plan.starts[row]), int(plan.counts[row])
        # The last prompt position predicts the first output token, which is no prompt token.
        stop = min(start + count, state.extras[slot].prompt_length - 1)
        first = int(ends[row]) - count
        scores: list[TokenLogprobs] = []
        for at in range(start, stop, ROWS):
            last = min(at + ROWS, stop)
            rows = logits(hidden_TE[first + at - start : first + last - start]).float()
            targets = tokens[slot, at + 1 : last + 1].long()
            wanted = np.full(last - at, state.prompt_logprobs[slot])
            scores += token_logprobs(rows, targets, wanted, as_logits=as_logits)
        if scores:
            found[slot] = scores
    return found or None
