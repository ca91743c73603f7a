"""Mixture of experts: routing in the core, expert matrices by an experts backend. Legend: T tokens, X experts, S
chosen, E width, F intermediate.
"""

from __future__ import annotations

import torch

from jackfield.interfaces import Communicator, LayerInfo, LinearScheme, MoEConfig
from jackfield.interfaces.moe import ExpertsBackend
from jackfield.layers.parameters import LoadableModule, SchemeWeight


def route(logits_TX: torch.Tensor, config: MoEConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [T, S] (float32) and expert indices [T, S] of each token.

    ``softmax`` scoring: probabilities over all experts, then top-k; ``sigmoid``: independent scores. With
    ``num_groups`` above 1 only experts of the
    ``top_groups`` best groups (by their best expert) can be chosen. Ties go to the smaller index.
    """
    scores = logits_TX.float().softmax(-1) if config.scoring == "softmax" else logits_TX.float().sigmoid()
    choice = scores
    if config.num_groups > 1:
        grouped = scores.view(len(scores), config.num_groups, scores.shape[1] // config.num_groups)
        best = grouped.amax(-1).argsort(dim=-1, descending=True, stable=True)[:, : config.top_groups]
        keep = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, True)
        choice = scores.masked_fill(~keep.repeat_interleave(grouped.shape[-1], dim=-1), float("-inf"))
    experts = choice.argsort(dim=-1, descending=True, stable=True)[:, : config.top_k]
    weights = scores.gather(1, experts)
    if config.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * config.scale, experts


class Moe(LoadableModule):
    """A block of routed experts; gate and up are stacked per expert."""

    def __init__(
        self,
        name: str,
        config: MoEConfig,
        gate_up: tuple[LayerInfo, LinearScheme],
        down: tuple[LayerInfo, LinearScheme],
        backend: ExpertsBackend,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        super().__init__(name)
        self.config = config
        self.gate_up = ExpertWeight(*gate_up, device)
        self.down = ExpertWeight(*down, device)
        self._backend = backend
        self._communicator = communicator

    def forward(self, x_TE: torch.Tensor, logits_TX: torch.Tensor) -> torch.Tensor:
        """Return [T, E]."""
        weights_TS, experts_TS = route(logits_TX, self.config)
        gate_up, down = (w.get_parameter("weight") for w in (self.gate_up, self.down))
        out = self._backend.apply(x_TE, gate_up, down, weights_TS.to(x_TE.dtype), experts_TS)
        return self._communicator.all_reduce(out)


class ExpertWeight(SchemeWeight):
    """The stacked matrices of all experts; a checkpoint tensor of one expert fills one slice."""

    def load_expert(self, expert: int, shard: str, suffix: str, tensor: torch.Tensor) -> bool:
        """Take one expert's matrix; return False when no parameter wants that suffix."""
        wanted = [s for s in self._specs if s.suffix == suffix and s.shard in (None, shard)]
        for spec in wanted:
            stacked = tensor.unsqueeze(0)
            self._copy(self._place(spec, shard)[expert : expert + 1], self._cut(spec, shard, stacked), spec.name)
            self._loaded.setdefault(spec.name, set()).add((expert, shard))
            if len(self._loaded[spec.name]) == self.info.num_experts * len(self.info.shards):
                for part in self.info.shards:
                    self._filled(spec.name, part.name)
        return bool(wanted)

    def __init__(self, info: LayerInfo, scheme: LinearScheme, device: torch.device) -> None:
        super().__init__(info, scheme, device)
        self._loaded: dict[str, set[tuple[int, str]]] = {}
