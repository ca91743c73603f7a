"""Changes to logits before sampling, in their documented order:

allowed ids → logit bias → bad words → repetition, frequency and presence penalties → suppression of end ids by
min_tokens. What is allowed stays allowed where the rest together would ban all of it.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch

from jackfield.sampling.state import SlotExtras

MINUS_INFINITY = float("-inf")


def edit_row(logits_V: torch.Tensor, extras: SlotExtras, tokens: torch.Tensor) -> None:
    """Apply one request's edits in place. ``tokens`` are its prompt and output so far."""
    params = extras.params
    output = tokens[extras.prompt_length :]
    keep = kept = None
    if params.allowed_token_ids:
        keep = torch.tensor(params.allowed_token_ids, device=logits_V.device)
        kept = logits_V[keep]
        logits_V.fill_(MINUS_INFINITY)
        logits_V[keep] = kept
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits_V.device)
        logits_V[ids] += torch.tensor(list(params.logit_bias.values()), device=logits_V.device, dtype=logits_V.dtype)
    for word in extras.bad_words:
        if _ends_with(output, word[:-1]):
            logits_V[word[-1]] = MINUS_INFINITY
    _penalize(logits_V, extras, tokens, output)
    if len(output) < params.min_tokens and extras.stop_ids:
        logits_V[torch.tensor(extras.stop_ids, device=logits_V.device)] = MINUS_INFINITY
    if keep is not None and kept is not None:
        # Bans that leave nothing would let tokens out that are not allowed: the allow list is the stronger word.
        left = logits_V[keep]
        logits_V[keep] = torch.where((left == MINUS_INFINITY).all(), kept, left)


def _penalize(logits_V: torch.Tensor, extras: SlotExtras, tokens: torch.Tensor, output: torch.Tensor) -> None:
    params = extras.params
    if params.repetition_penalty != 1.0:
        seen = torch.unique(tokens).long()
        values = logits_V[seen]
        rate = params.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / rate, values * rate)
    if params.frequency_penalty or params.presence_penalty:
        ids, counts = torch.unique(output, return_counts=True)
        logits_V[ids.long()] -= params.frequency_penalty * counts.to(logits_V.dtype) + params.presence_penalty


def _ends_with(output: torch.Tensor, prefix: list[int]) -> bool:
    if not prefix:
        return True
    return len(output) >= len(prefix) and output[-len(prefix) :].tolist() == prefix
