"""Multi-head latent attention in torch. Legend: T tokens, E width, R latent, P rotated features, H
heads, Q latent of the queries, J index heads, I size of an index key.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from jackfield.interfaces import AttentionGroup, BuildContext, ForwardContext, OutputShard, Parallel
from jackfield_models.mla_parts import IndexedSizes, LatentSizes


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
        q_latent_TQ = x_TE if self.q_norm is None else self.q_norm(parts[0])
        latent_TR, rope_TP = parts[-2:]
        q_THD = self.q_up(q_latent_TQ).unflatten(-1, (-1, self._size))
        index = self.index(x_TE, q_latent_TQ)
        attended_TN = self.attention(q_THD, self.kv_norm(latent_TR), rope_TP, positions_T, ctx, **index)
        if self.gate is not None:
            gate_TH = self.gate(x_TE).float().sigmoid().to(x_TE.dtype)
            attended_TN = (attended_TN.unflatten(-1, (gate_TH.shape[1], -1)) * gate_TH.unsqueeze(-1)).flatten(1)
        mixed_TE: torch.Tensor = self.out(attended_TN)
        return mixed_TE

    def index(self, x_TE: torch.Tensor, q_latent_TQ: torch.Tensor) -> dict[str, Any]:
        """Return what attention takes besides: nothing, where all tokens are attended to."""
        return {}


class IndexedMixer(LatentMixer):
    """The same to tokens that an indexer chooses. Every rank has the whole indexer: all must choose alike."""

    def __init__(
        self, index: int, path: str, width: int, sizes: IndexedSizes, group: AttentionGroup, ctx: BuildContext
    ) -> None:
        super().__init__(index, path, width, sizes, group, ctx)
        self.index_q = ctx.linear(f"{path}.index_q", sizes.q_rank, sizes.index_heads * sizes.index_size)
        self.index_k = ctx.linear(f"{path}.index_k", width, sizes.index_size)
        self.index_k_norm = ctx.norm(f"{path}.index_k_norm", sizes.index_size, sizes.eps, kind="layer")
        shape = {"weight": (sizes.index_heads, width)}
        self.index_weight = ctx.parameters(f"{path}.index_weight", shape, dtype=torch.float32)
        self._index_heads, self._factor = sizes.index_heads, (sizes.index_heads * sizes.index_size) ** -0.5

    def index(self, x_TE: torch.Tensor, q_latent_TQ: torch.Tensor) -> dict[str, Any]:
        """Return queries, keys and weights of the indexer."""
        q_TJI = self.index_q(q_latent_TQ).unflatten(-1, (self._index_heads, -1))
        weight_TJ = F.linear(x_TE.float(), self.index_weight.weight) * self._factor
        return {"index": (q_TJI, self.index_k_norm(self.index_k(x_TE)), weight_TJ)}
