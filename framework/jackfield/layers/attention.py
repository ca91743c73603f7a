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
from jackfield.layers.norm import HeadNorm, LayerNorm, RmsNorm
from jackfield.layers.rotary import Rotary
from jackfield.layers.rotary_fourier import FourierRotary

Norm = RmsNorm | LayerNorm | HeadNorm


class Attention(nn.Module):
    """Softmax attention over a cache. ``norm_last``: rotation comes before the norms. ``fused``: the backend's
    ``prepare`` does both and writes the cache, as far as it can do what this layer wants.
    """

    def __init__(
        self,
        index: int,
        name: str,
        group: AttentionGroup,
        backend: Any,
        heads: int,
        kv_heads: int,
        ops: Mapping[str, Callable[..., Any]],
        rotary: Rotary | FourierRotary | None,
        q_norm: Norm | None,
        k_norm: Norm | None,
        *,
        norm_last: bool = False,
        fused: bool = False,
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
        self._norm_last = norm_last and q_norm is not None
        plain = all(norm is None or isinstance(norm, RmsNorm) for norm in (q_norm, k_norm))
        shared = not isinstance(rotary, FourierRotary)
        self._fused = fused and plain and shared and not self._norm_last

    def forward(self, qkv: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Mix tokens.

        Args:
            qkv: [T, H*D + K*D + K*V], overwritten. positions: [T]. ctx: of this step.

        Returns:
            [T, H*V].
        """
        tokens = qkv.shape[0]
        q_size, k_size = self.heads * self.head_size, self.kv_heads * self.head_size
        cache, slots = ctx.cache(self.index), ctx.slots(self.group)
        angles = None if self.rotary is None else ctx.angles(self.rotary, positions)
        q_THD = qkv[:, :q_size].view(tokens, self.heads, self.head_size)
        if self._fused:
            self.backend.prepare(qkv, angles, *self._norm_weights(), cache, slots)
        else:
            qk = qkv[:, : q_size + k_size].view(tokens, self.heads + self.kv_heads, self.head_size)
            v_TKV = qkv[:, q_size + k_size :].view(tokens, self.kv_heads, self.value_size)
            self._prepare(qk, angles)
            self.backend.write(qk[:, self.heads :], v_TKV, cache, slots)
        out = torch.empty((tokens, self.heads, self.value_size), dtype=qkv.dtype, device=qkv.device)
        backend = self.backend

        def attend(metadata: Any, count: int) -> None:
            backend.attend(q_THD[:count], cache, metadata, out[:count])

        ctx.unrecorded(self.group, attend)
        return out.flatten(1)

    def _prepare(self, qk_TJD: torch.Tensor, angles: torch.Tensor | None) -> None:
        """Normalize and rotate queries and keys (J = H + K heads) in place."""
        if not self._norm_last:
            self._normalize(qk_TJD)
        if angles is not None and angles.dim() == 2:
            self._rotate(qk_TJD, angles)
        elif angles is not None:
            self._rotate_heads(qk_TJD, angles)
        if self._norm_last:
            self._normalize(qk_TJD)

    def _rotate_heads(self, qk_TJD: torch.Tensor, angles_TKR: torch.Tensor) -> None:
        """Rotate each cache head, and the query heads that share it, by angles of its own."""
        angles = angles_TKR.flatten(0, 1)
        for part in (qk_TJD[:, : self.heads], qk_TJD[:, self.heads :]):
            by_head = part.clone(memory_format=torch.contiguous_format).view(len(angles), -1, part.shape[-1])
            part.copy_(self._rotate(by_head, angles).view(part.shape))

    def _normalize(self, qk_TJD: torch.Tensor) -> None:
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TKD = qk_TJD[:, : self.heads], qk_TJD[:, self.heads :]
            q_THD.copy_(self.q_norm(q_THD))
            k_TKD.copy_(self.k_norm(k_TKD))

    def _norm_weights(self) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
        if not isinstance(self.q_norm, RmsNorm) or not isinstance(self.k_norm, RmsNorm):
            return None, None, 0.0
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps


class EncoderAttention(Attention):
    """Softmax attention inside each sequence of a step. Nothing is kept."""

    def forward(self, qkv: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """See Attention."""
        tokens, split = qkv.shape[0], (self.heads + self.kv_heads) * self.head_size
        qk = qkv[:, :split].view(tokens, self.heads + self.kv_heads, self.head_size)
        v_TKV = qkv[:, split:].view(tokens, self.kv_heads, self.value_size)
        self._prepare(qk, None if self.rotary is None else ctx.angles(self.rotary, positions))
        out = torch.empty((tokens, self.heads, self.value_size), dtype=qkv.dtype, device=qkv.device)
        q_THD, k_TKD = qk[:, : self.heads], qk[:, self.heads :]
        self.backend.attend_fresh(q_THD, k_TKD, v_TKV, ctx.metadata(self.group), out)
        return out.flatten(1)
