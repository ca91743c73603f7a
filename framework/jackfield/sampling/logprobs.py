"""Log probabilities of chosen tokens and of the most likely ones. Legend: R rows, V vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jackfield.protocol.requests import TokenLogprobs


def token_logprobs(
    logits_RV: torch.Tensor, chosen_R: torch.Tensor, wanted: npt.NDArray[Any], *, as_logits: bool = False
) -> list[TokenLogprobs]:
    """Return one entry per row: the chosen token first, then the ``wanted`` most likely ones (-1: all).

    Args:
        as_logits: give the logits themselves.
    """
    values = logits_RV.float() if as_logits else logits_RV.float().log_softmax(-1)
    chosen = chosen_R.unsqueeze(-1)
    chosen_values = values.gather(1, chosen)
    ranks = ((values > chosen_values).sum(-1) + 1).tolist()
    counts = np.where(wanted < 0, values.shape[1], np.minimum(wanted, values.shape[1]))
    top_values, top_ids = values.topk(int(counts.max()), dim=-1)
    ids = torch.cat((chosen, top_ids), -1).tolist()
    numbers = torch.cat((chosen_values, top_values), -1).tolist()
    keep = (counts + 1).tolist()
    return [TokenLogprobs(i[:k], n[:k], r) for i, n, r, k in zip(ids, numbers, ranks, keep, strict=True)]
