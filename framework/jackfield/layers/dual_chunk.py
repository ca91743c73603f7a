"""Dual-chunk attention (arXiv:2402.17463; with the factor of Qwen2.5-1M, arXiv:2501.15383): distances are counted anew
in every chunk, so that none is larger than a model saw in training.

A key is rotated by its place in its chunk. A query is rotated three times: for keys of its own chunk, of the chunk
before, and of all earlier ones. Legend: T tokens, H query heads, K cache heads, D head size, V value size, R rotary
size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from jackfield.interfaces import AttentionGroup, ForwardContext
from jackfield.layers.attention import Attention
from jackfield.layers.rotary import Rotary

OWN = 0
"""Index of the rotation for keys of the query's own chunk."""


class DualChunkRotary(nn.Module):
    """Angles of keys, and of queries for each of the three kinds of chunks.

    Args:
        rotary: looks up angles of positions up to ``reach``. chunk: tokens in a chunk. reach: the largest distance that
            is told apart.
    """

    def __init__(self, rotary: Rotary, chunk: int, reach: int) -> None:
        super().__init__()
        self.rotary = rotary
        self._chunk, self._reach = chunk, reach

    def forward(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Return cosines and sines [T, 3, R] for the own chunk (which are the key's too), the one before, all earlier
        ones.
        """
        place_T = positions_T % self._chunk
        before_T = (place_T + self._chunk).clamp(max=self._reach)
        earlier_T = torch.full_like(place_T, min(2 * self._chunk - 1, self._reach))
        places_T3 = torch.stack((place_T, before_T, earlier_T), -1)
        angles: torch.Tensor = self.rotary(places_T3.flatten())
        return angles.view(*places_T3.shape, -1)


class DualChunkAttention(Attention):
    """Softmax attention whose backend has the feature ``dual_chunk``: it gets queries [T, 3 H, D]."""

    def __init__(self, index: int, name: str, group: AttentionGroup, *args: Any, **values: Any) -> None:
        super().__init__(index, name, group, *args, **{**values, "fused": False})
        self._original = int(group.extra["original_length"])

    def forward(self, qkv: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """See Attention."""
        tokens, split = qkv.shape[0], (self.heads + self.kv_heads) * self.head_size
        qk = qkv[:, :split].view(tokens, self.heads + self.kv_heads, self.head_size)
        v_TKV = qkv[:, split:].view(tokens, self.kv_heads, self.value_size)
        q_T3HD = self._turned(qk, positions, ctx)
        cache = ctx.cache(self.index)
        self.backend.write(qk[:, self.heads :], v_TKV, cache, ctx.slots(self.group))
        out = torch.empty((tokens, self.heads, self.value_size), dtype=qkv.dtype, device=qkv.device)
        q_TSD, backend = q_T3HD.flatten(1, 2), self.backend

        def attend(metadata: Any, count: int) -> None:
            backend.attend(q_TSD[:count], cache, metadata, out[:count])

        ctx.unrecorded(self.group, attend)
        return out.flatten(1)

    def _turned(self, qk_TJD: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Normalize and rotate keys in place; return queries [T, 3, H, D], rotated three times."""
        angles_T3R = ctx.angles(self.rotary, positions)
        self._normalize(qk_TJD)
        q_T3HD = qk_TJD[:, None, : self.heads].repeat(1, angles_T3R.shape[1], 1, 1)
        self._rotate(q_T3HD.flatten(0, 1), angles_T3R.flatten(0, 1))
        self._rotate(qk_TJD[:, self.heads :], angles_T3R[:, OWN])
        return q_T3HD if not self._original else q_T3HD * self._factor(positions).to(q_T3HD.dtype)

    def _factor(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the factor on queries [T, 1, 1, 1]: YaRN's on queries and keys (arXiv:2309.00071, section 3.4), for as
        many tokens as the query sees. So it depends on nothing that comes later, and keys can stay in the cache.
        """
        longer = torch.log((positions_T + 1) / self._original).clamp(min=0)
        return (0.1 * longer + 1).square().view(-1, 1, 1, 1)
