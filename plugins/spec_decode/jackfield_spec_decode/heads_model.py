"""Heads in torch. Legend: B sequences, E width, I inner width, K drafts, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from jackfield.interfaces import BuildContext
from jackfield_spec_decode.heads import MedusaConfig, MlpSpeculatorConfig

EPSILON = 1e-6
Step = tuple[torch.Tensor, torch.Tensor]
"""The state for the next place, and logits [B, V] for this one."""


class MedusaHeads(nn.Module):
    """Head k says what comes k + 2 tokens behind the state's token: the target's own head says the first."""

    def __init__(self, config: MedusaConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.num_heads, width = config.num_heads, config.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                ctx.linear(f"blocks.{head}.{layer}", width, width, bias=config.bias) for layer in range(config.depth)
            )
            for head in range(config.num_heads)
        )
        count = 1 if config.one_head else config.num_heads
        self.heads = nn.ModuleList(ctx.head(f"heads.{head}", config.vocab_size, width) for head in range(count))

    def step(self, place: int, hidden_BE: torch.Tensor, last_B: torch.Tensor) -> Step:
        """Return the state itself, and the head's logits: heads do not see what the others said."""
        return hidden_BE, self.heads[min(place, len(self.heads) - 1)](self._inner(place, hidden_BE))

    def likeliest(self, hidden_BE: torch.Tensor, count: int) -> torch.Tensor:
        """Return [B, K] what the first ``count`` heads find likeliest. Where they share a projection, its weight, by
        far the largest part of them, is read once for all.
        """
        inner = [self._inner(place, hidden_BE) for place in range(count)]
        if len(self.heads) == 1:
            logits_XV: torch.Tensor = self.heads[0](torch.stack(inner, 1).flatten(0, 1))
            return logits_XV.argmax(-1).view(-1, count)
        return torch.stack([head(x_BE).argmax(-1) for head, x_BE in zip(self.heads, inner, strict=False)], 1)

    def _inner(self, place: int, x_BE: torch.Tensor) -> torch.Tensor:
        """Return what a head's projection takes."""
        for layer in self.blocks[place]:  # type: ignore[attr-defined]
            x_BE = x_BE + F.silu(layer(x_BE))
        return x_BE


class MlpHeads(nn.Module):
    """Head k takes the state of the head before it (or the target's) and the token just drafted."""

    def __init__(self, config: MlpSpeculatorConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.num_heads, vocab, inner = config.num_heads, config.vocab_size, config.inner_size
        count = 1 if config.tied else config.num_heads
        projections = min(2, config.num_heads) if config.tied else config.num_heads
        sizes = [config.hidden_size] + [inner] * (projections - 1)
        self.emb = nn.ModuleList(ctx.embedding(f"emb.{head}", vocab, inner) for head in range(count))
        self.proj = nn.ModuleList(ctx.linear(f"proj.{head}", size, inner) for head, size in enumerate(sizes))
        shapes = {"weight": (inner,), "bias": (inner,)}
        self.ln = nn.ModuleList(ctx.parameters(f"ln.{head}", shapes) for head in range(count))
        self.head = nn.ModuleList(ctx.head(f"head.{head}", vocab, inner) for head in range(count))
        self._scaled = config.scaled
        # Both keep the variance of states the same from head to head.
        self._state_weight = 0.5 ** (0.5 / config.num_heads)
        self._token_weight = float(((1 - self._state_weight**2) * (inner / 2)) ** 0.5)

    def step(self, place: int, hidden_BE: torch.Tensor, last_B: torch.Tensor) -> Step:
        """Return the head's state [B, I] and logits."""
        if place == 0 and self._scaled:
            hidden_BE = _normalized(hidden_BE) / 2**0.5
        at = min(place, len(self.emb) - 1)
        state_BI = self.proj[min(place, len(self.proj) - 1)](hidden_BE)
        state_BI = state_BI + self.emb[at](last_B) * (self._token_weight / self._state_weight)
        weight_I, bias_I = (self.ln[at].get_parameter(name) for name in ("weight", "bias"))
        state_BI = F.gelu(_normalized(state_BI) * weight_I + bias_I)
        return state_BI, self.head[at](state_BI)


def _normalized(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` divided by the root of its mean square."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)
