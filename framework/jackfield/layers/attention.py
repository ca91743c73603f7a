"""The attention of one layer: normalizes and rotates queries and keys, writes the cache, attends.

All of that is one call, so that a platform can fuse it. Legend: T tokens, H query heads, K cache heads, D head size,
V value head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from jackfield.interfaces import AttentionGroup, ForwardContext
from jackfield.layers.norm import RmsNorm
from jackfield.layers.rotary import Rotary


class Attention(nn.Module):
    """Softmax attention over a cache."""

    def __init__(
        self,
        index: int,
        name: str,
        group: AttentionGroup,
        backend: Any,
        heads: int,
        kv_heads: int,
        ops: Mapping[str, Callable[..., Any]],
        rotary: Rotary | None,
        q_norm: RmsNorm | None,
        k_norm: RmsNorm | None,
    ) -> None:
        super().__init__()
        self.index = index
        self.group = name
        self.heads, self.kv_heads = heads, kv_heads
        self.head_size, self.value_size = group.head_size, group.value_head_size or group.head_size
        self.backend = backend
        self.rotary = rotary
        self.q_norm, self.k_norm = q_norm, k_norm
        self._rotate = ops["rotary"]

    def forward(self, qkv: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Mix tokens.

        Args:
            qkv: [T, H*D + K*D + K*V], overwritten. positions: [T]. ctx: of this step.

        Returns:
            [T, H*V].
        """
        tokens = qkv.shape[0]
        q_size, k_size = self.heads * self.head_size, self.kv_heads * self.head_size
        qk = qkv[:, : q_size + k_size].view(tokens, self.heads + self.kv_heads, self.head_size)
        q_THD, k_TKD = qk[:, : self.heads], qk[:, self.heads :]
        v_TKV = qkv[:, q_size + k_size :].view(tokens, self.kv_heads, self.value_size)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD.copy_(self.q_norm(q_THD))
            k_TKD.copy_(self.k_norm(k_TKD))
        if self.rotary is not None:
            self._rotate(qk, ctx.angles(self.rotary, positions))
        cache = ctx.cache(self.index)
        out = torch.empty((tokens, self.heads, self.value_size), dtype=qkv.dtype, device=qkv.device)
        self.backend.write(k_TKD, v_TKV, cache, ctx.slots(self.group))
        self.backend.attend(q_THD, cache, ctx.metadata(self.group), out)
        return out.flatten(1)
