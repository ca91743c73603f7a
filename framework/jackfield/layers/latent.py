"""Multi-head latent attention (arXiv:2405.04434): the cache holds one latent and one rotary key for all heads.

Legend: T tokens, H heads, N features of a head without rotation, P rotated ones, R size of the latent, V value size,
J index heads, I size of an index key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from jackfield.interfaces import ForwardContext
from jackfield.layers.linear import Linear
from jackfield.layers.rotary import Rotary


class LatentAttention(nn.Module):
    """Rotates, writes the cache and attends. ``kv_up`` expands latents to keys and values of all heads; the backend
    takes its weight once it is final, and decides in which form it attends.
    """

    def __init__(
        self,
        index: int,
        name: str,
        backend: Any,
        kv_up: Linear,
        heads: int,
        sizes: tuple[int, int, int],
        rotary: Rotary | None,
        rotate: Any,
    ) -> None:
        super().__init__()
        self.index, self.group, self.backend, self.rotary = index, name, backend, rotary
        self.heads = heads
        self.plain_size, self.rope_size, self.value_size = sizes
        self._rotate, self._kv_up, self._bound = rotate, [kv_up], False

    def forward(
        self,
        q_THD: torch.Tensor,
        latent_TR: torch.Tensor,
        rope_TP: torch.Tensor,
        positions: torch.Tensor,
        ctx: ForwardContext,
    ) -> torch.Tensor:
        """Mix tokens.

        Args:
            q_THD: queries [T, H, N + P], the rotated features last; overwritten. latent_TR: normalized latents.
            rope_TP: rotary keys; overwritten. positions: [T]. ctx: of this step.

        Returns:
            [T, H * V].
        """
        cache = self._enter(q_THD, latent_TR, rope_TP, positions, ctx)
        out_THV = q_THD.new_empty((len(q_THD), self.heads, self.value_size))
        backend = self.backend

        def attend(metadata: Any, count: int) -> None:
            backend.attend(q_THD[:count], cache, metadata, out_THV[:count])

        ctx.unrecorded(self.group, attend)
        return out_THV.flatten(1)

    def _enter(
        self,
        q_THD: torch.Tensor,
        latent_TR: torch.Tensor,
        rope_TP: torch.Tensor,
        positions: torch.Tensor,
        ctx: ForwardContext,
    ) -> Mapping[str, torch.Tensor]:
        """Rotate and write; returns the cache."""
        self._bind()
        cache = ctx.cache(self.index)
        if self.rotary is not None:
            angles = ctx.angles(self.rotary, positions)
            self._rotate(q_THD[..., self.plain_size :], angles)
            self._rotate(rope_TP.unsqueeze(1), angles)
        self.backend.write(latent_TR, rope_TP, cache, ctx.slots(self.group))
        return cache

    def _bind(self) -> None:
        # Weights are final only after loading; the first call comes before anything is recorded.
        if not self._bound:
            self.backend.bind(self._kv_up[0])
            self._bound = True


class IndexedLatentAttention(LatentAttention):
    """The same over tokens that an indexer chooses; what it compares is rotated as latents' keys are, but in its first
    features.
    """

    def forward(  # type: ignore[override]  # what the indexer compares comes with it
        self,
        q_THD: torch.Tensor,
        latent_TR: torch.Tensor,
        rope_TP: torch.Tensor,
        positions: torch.Tensor,
        ctx: ForwardContext,
        index: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """See LatentAttention.

        Args:
            index: queries [T, J, I], keys [T, I] (both are overwritten), and weights [T, J] in float32.
        """
        cache, backend = self._enter(q_THD, latent_TR, rope_TP, positions, ctx), self.backend
        index_TJI, key_TI, weight_TJ = index
        if self.rotary is not None:
            angles = ctx.angles(self.rotary, positions)
            self._rotate(index_TJI[..., : self.rope_size], angles)
            self._rotate(key_TI.unsqueeze(1)[..., : self.rope_size], angles)
        backend.write_index(key_TI, cache, ctx.slots(self.group))
        out_THV = q_THD.new_empty((len(q_THD), self.heads, self.value_size))

        def attend(metadata: Any, count: int) -> None:
            chosen = backend.choose(index_TJI[:count], weight_TJ[:count], cache, metadata)
            backend.attend_chosen(q_THD[:count], chosen, cache, metadata, out_THV[:count])

        ctx.unrecorded(self.group, attend)
        return out_THV.flatten(1)
