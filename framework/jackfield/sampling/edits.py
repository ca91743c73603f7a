"""Changes to logits before sampling, in their documented order:

allowed ids → logit bias → bad words → repetition, frequency and presence penalties → suppression of end ids by
min_tokens. What is allowed stays allowed where the rest together would ban all of it.

Legend: R rows, V vocabulary, L tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jackfield.sampling.state import SlotExtras

MINUS_INFINITY = float("-inf")
ROWS = 64
"""Rows that are penalized at once: each needs a count of every token."""
_FIELDS = ("repetition", "frequency", "presence", "lengths", "prompts")


@dataclass(slots=True)
class AllowList:
    """Ids that alone may be sampled in a row, and their logits before anything banned some of them."""

    ids: torch.Tensor
    logits: torch.Tensor


def edit_first(logits_V: torch.Tensor, extras: SlotExtras, tokens: torch.Tensor) -> AllowList | None:
    """Apply what comes before penalties to one row, in place. ``tokens`` are its prompt and output so far."""
    params, allowed = extras.params, None
    if params.allowed_token_ids:
        ids = torch.tensor(params.allowed_token_ids, device=logits_V.device)
        allowed = AllowList(ids, logits_V[ids])
        logits_V.fill_(MINUS_INFINITY)
        logits_V[ids] = allowed.logits
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits_V.device)
        logits_V[ids] += torch.tensor(list(params.logit_bias.values()), device=logits_V.device, dtype=logits_V.dtype)
    for word in extras.bad_words:
        if _ends_with(tokens[extras.prompt_length :], word[:-1]):
            logits_V[word[-1]] = MINUS_INFINITY
    return allowed


def edit_last(logits_V: torch.Tensor, extras: SlotExtras, length: int, allowed: AllowList | None) -> None:
    """Apply what comes behind penalties to one row of ``length`` tokens, in place."""
    if length - extras.prompt_length < extras.params.min_tokens and extras.stop_ids:
        logits_V[torch.tensor(extras.stop_ids, device=logits_V.device)] = MINUS_INFINITY
    if allowed is not None:
        # Bans that leave nothing would let tokens out that are not allowed: the allow list is the stronger word.
        left = logits_V[allowed.ids]
        logits_V[allowed.ids] = torch.where((left == MINUS_INFINITY).all(), allowed.logits, left)


@dataclass(frozen=True, slots=True)
class Penalties:
    """The rows that are penalized: float32 [R] factors, and [R] int64 numbers of tokens in all and in the prompt."""

    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    lengths: torch.Tensor
    prompts: torch.Tensor


def penalize(logits_RV: torch.Tensor, tokens_RL: torch.Tensor, by: Penalties) -> None:
    """Apply repetition, frequency and presence penalties to all rows in place, a few rows at a time.

    Args:
        tokens_RL: prompt and output so far, and anything behind them.
    """
    for first in range(0, len(logits_RV), ROWS):
        part = slice(first, first + ROWS)
        _penalize(logits_RV[part], tokens_RL[part], Penalties(*(getattr(by, name)[part] for name in _FIELDS)))


def _penalize(logits_RV: torch.Tensor, tokens_RL: torch.Tensor, by: Penalties) -> None:
    rows, vocabulary = logits_RV.shape
    place_L = torch.arange(tokens_RL.shape[1], device=logits_RV.device)
    # One column more than there are tokens takes what does not count.
    ids_RL = torch.where(place_L < by.lengths.unsqueeze(1), tokens_RL.long(), vocabulary)
    seen_RV = torch.zeros((rows, vocabulary + 1), dtype=torch.bool, device=logits_RV.device)
    seen_RV.scatter_(1, ids_RL, True)
    rate_R1 = by.repetition.unsqueeze(1)
    scaled_RV = torch.where(logits_RV > 0, logits_RV / rate_R1, logits_RV * rate_R1)
    logits_RV.copy_(torch.where(seen_RV[:, :-1], scaled_RV, logits_RV))
    outputs_RL = torch.where(place_L >= by.prompts.unsqueeze(1), ids_RL, vocabulary)
    counts_RV = torch.zeros((rows, vocabulary + 1), dtype=torch.float32, device=logits_RV.device)
    counts_RV.scatter_add_(1, outputs_RL, torch.ones_like(outputs_RL, dtype=torch.float32))
    counts_RV = counts_RV[:, :-1]
    logits_RV -= by.frequency.unsqueeze(1) * counts_RV + by.presence.unsqueeze(1) * (counts_RV > 0)


def _ends_with(output: torch.Tensor, prefix: list[int]) -> bool:
    if not prefix:
        return True
    return len(output) >= len(prefix) and output[-len(prefix) :].tolist() == prefix
