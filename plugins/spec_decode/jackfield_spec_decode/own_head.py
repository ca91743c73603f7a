"""Heads that draft layers have of their own. Legend: B rows, E width, D tokens that the head knows, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from jackfield.interfaces import BuildContext


class OwnHead(nn.Module):
    """Base of modules with a head over some tokens of the target, or over all: ``d2t`` is how far each token's id lies
    behind its place, or None.
    """

    def make_head(self, tokens: int, vocab_size: int, width: int, ctx: BuildContext) -> None:
        """Make ``head`` and ``d2t``."""
        self.head = ctx.head("head", tokens, width)
        self.d2t: Any = None
        self._vocab_size = vocab_size
        if tokens != vocab_size:
            self.d2t = ctx.parameters("d2t", {"weight": (tokens,)}, dtype=torch.int64)

    def logits(self, states_BE: torch.Tensor, target: nn.Module) -> torch.Tensor:
        """Return logits [B, V] over the target's vocabulary."""
        own_BD: torch.Tensor = self.head(states_BE)
        if self.d2t is None:
            return own_BD
        logits_BV = own_BD.new_full((len(own_BD), self._vocab_size), float("-inf"))
        ids_D = torch.arange(own_BD.shape[1], device=own_BD.device) + self.d2t.weight
        logits_BV[:, ids_D] = own_BD
        return logits_BV

    def likeliest(self, states_BE: torch.Tensor, target: nn.Module) -> torch.Tensor:
        """Return [B] the tokens with the largest logits."""
        ids_B: torch.Tensor = self.head(states_BE).argmax(-1)
        return ids_B if self.d2t is None else ids_B + self.d2t.weight[ids_B]
