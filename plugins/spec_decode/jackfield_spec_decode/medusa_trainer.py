"""Trains Medusa heads beside a target that stays as it is (Medusa-1; Cai et al. 2024, arXiv:2401.10774).

Legend: B documents, L tokens of the longest, N places, E width, V vocabulary, K heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from jackfield.interfaces import Agreement, DraftTrainer, TrainedDraft, TrainerEnv, TrainingBatch
from jackfield_spec_decode.training_goals import FADING, Places, goal_logits, greedy, reached


class Block(nn.Module):
    """Residual layers of one head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        for layer in self.layers:
            # The head begins as the target's own.
            nn.init.zeros_(layer.weight)  # type: ignore[arg-type]

    def forward(self, x_NE: torch.Tensor) -> torch.Tensor:
        """Return [N, E]."""
        for layer in self.layers:
            x_NE = x_NE + F.silu(layer(x_NE))
        return x_NE


class MedusaNetwork(nn.Module):
    """All that a Medusa checkpoint has.

    Args:
        head_VE: the target's projection. heads: K. depth: residual layers of each. own: each has a projection of its
            own, which is learnt; else all share the target's.
    """

    def __init__(self, head_VE: torch.Tensor, heads: int, depth: int, *, own: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(head_VE.shape[1], depth) for _ in range(heads))
        vocab, width = head_VE.shape
        copies = [nn.Linear(width, vocab, bias=False, device="meta") for _ in range(heads if own else 1)]
        for copy in copies:
            copy.weight = nn.Parameter(head_VE.clone(), requires_grad=own)
        self.lm_heads = nn.ModuleList(copies)

    def forward(self, hidden_NE: torch.Tensor, head: int) -> torch.Tensor:
        """Return logits [N, V] of one head."""
        logits_NV: torch.Tensor = self.lm_heads[min(head, len(self.lm_heads) - 1)](self.blocks[head](hidden_NE))
        return logits_NV


class MedusaTrainer(DraftTrainer):
    """Trains heads of residual layers; head k says what stands k + 2 tokens behind the state's."""

    learning_rate: ClassVar[float] = 1e-3

    def __init__(self, env: TrainerEnv) -> None:
        self._env, settings = env, env.settings
        self._heads, self._depth, self._own = settings["heads"], settings["layers"], settings["train_head"]
        self._network = MedusaNetwork(env.target.head().cpu(), self._heads, self._depth, own=self._own)
        self.module = self._network.to(env.device)

    def losses(self, batch: TrainingBatch) -> Iterator[torch.Tensor]:
        """See DraftTrainer: for some places at a time, the divergence of each head that looks so far ahead from the
        target's distribution.
        """
        places = Places.of(batch)
        counts = [int((places.token > head).sum()) for head in range(self._heads)]
        for part in places.chunks():
            goal_NV = goal_logits(self._env.target, batch, part).log_softmax(-1)
            for head, count in enumerate(counts):
                kept = part.token > head
                if not kept.any():
                    continue
                logits_NV = self._network(batch.hidden[part[kept].before(head + 1)], head)
                loss = F.kl_div(logits_NV.float().log_softmax(-1), goal_NV[kept], reduction="sum", log_target=True)
                yield FADING**head * loss / count

    def agreement(self, batch: TrainingBatch) -> Agreement:
        """See DraftTrainer."""
        best_BL, known_NK, places = greedy(self._env.target, batch), reached(batch, self._heads), Places.of(batch)
        right_NK = torch.zeros_like(known_NK)
        for head in range(self._heads):
            rows = known_NK[:, head].nonzero().flatten()
            there = Places(places.document[rows], places.token[rows] + head)
            drafts = [self._network(batch.hidden[part.before(head + 1)], head).argmax(-1) for part in there.chunks()]
            right_NK[rows, head] = torch.cat(drafts) == best_BL[there.before(0)] if drafts else False
        return Agreement(right_NK, known_NK)

    def checkpoint(self) -> TrainedDraft:
        """See DraftTrainer: the layout that servers read."""
        tensors = dict(self.module.state_dict())
        if not self._own:
            tensors["lm_head.weight"] = tensors.pop("lm_heads.0.weight")
        keys = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self._env.config.hidden_size,
            "vocab_size": self._env.config.vocab_size,
            "num_heads": self._heads,
            "num_hidden_layers": self._depth,
            "original_lm_head": not self._own,
            "medusa_fc_bias": False,
        }
        return TrainedDraft(keys, tensors)
