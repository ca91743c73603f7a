"""Multi-head latent attention in torch. Legend: T tokens, E width, R latent, P rotated features, H heads."""

from __future__ import annotations

import torch
from torch import nn

from jackfield.interfaces import AttentionGroup, BuildContext, ForwardContext, OutputShard, Parallel
from jackfield_models.mla_parts import LatentSizes


class LatentMixer(nn.Module):
    """Projects down to latents in one product, up to queries, and attends over the latents."""

    def __init__(
        self, index: int, path: str, width: int, sizes: LatentSizes, group: AttentionGroup, ctx: BuildContext
    ) -> None:
        super().__init__()
        size, column = sizes.plain + sizes.turned, Parallel.COLUMN
        self._split, self._size = [s.size for s in sizes.down], size
        self.down = ctx.linear(f"{path}.down", width, sizes.down, bias=sizes.bias)
        self.q_norm = ctx.norm(f"{path}.q_norm", sizes.q_rank, sizes.eps) if sizes.q_rank else None
        q_up, kv = OutputShard("", sizes.heads * size, size), sizes.plain + sizes.value
        self.q_up = ctx.linear(f"{path}.q_up", sizes.q_rank or width, [q_up], parallel=column)
        self.kv_norm = ctx.norm(f"{path}.kv_norm", sizes.latent, sizes.eps)
        kv_up = OutputShard("", sizes.heads * kv, kv)
        self.kv_up = ctx.linear(f"{path}.kv_up", sizes.latent, [kv_up], parallel=column)
        rope, rotary = sizes.rope, None
        if rope is not None:
            rotary = ctx.rotary(rope.size, theta=rope.theta, scaling=rope.scaling, max_position=sizes.max_position)
        self.attention = ctx.latent_attention(index, group, kv_up=self.kv_up, rotary=rotary)
        inner = sizes.heads * sizes.value
        self.out = ctx.linear(
            f"{path}.out", inner, width, bias=sizes.bias, parallel=Parallel.ROW, input_unit=sizes.value
        )

        self.gate = None
        if sizes.gated:
            self.gate = ctx.linear(f"{path}.gate", width, [OutputShard("", sizes.heads)], parallel=column)

    def forward(self, x_TE: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Return what attention adds, [T, E]."""
        parts = self.down(x_TE).split(self._split, -1)
        q_TN = self.q_up(x_TE if self.q_norm is None else self.q_norm(parts[0].contiguous()))
        latent_TR, rope_TP = (part.contiguous() for part in parts[-2:])
        q_THD = q_TN.unflatten(-1, (-1, self._size))
        attended_TN = self.attention(q_THD, self.kv_norm(latent_TR), rope_TP, positions_T, ctx)
        if self.gate is not None:
            gate_TH = self.gate(x_TE).float().sigmoid().to(x_TE.dtype)
            attended_TN = (attended_TN.unflatten(-1, (gate_TH.shape[1], -1)) * gate_TH.unsqueeze(-1)).flatten(1)
        mixed_TE: torch.Tensor = self.out(attended_TN)
        return mixed_TE
