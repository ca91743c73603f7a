"""Bidirectional attention in plain torch: sequences of one length go through scaled_dot_product_attention together, so
that nothing is padded. Nothing is kept.

Legend: T tokens, S sequences of one length, N tokens of each, H query heads, K key heads, D head size, V value size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from jackfield.interfaces import AttentionEnv, AttentionStep, HostLengths, StepLimits


@dataclass(slots=True)
class Alike:
    """Sequences of one length: places_SN of their tokens in the step, and which tokens see each other, [N, N], or None
    for all.
    """

    places_SN: torch.Tensor
    mask_NN: torch.Tensor | None


class EncoderMetadataBuilder:
    """Sorts the sequences of a step by length. The metadata is a list of :class:`Alike`."""

    host_lengths = HostLengths.EXACT

    def __init__(self, env: AttentionEnv) -> None:
        self._window, self._device = env.request.window, env.device

    def allocate(self, limits: StepLimits) -> None:
        """Nothing to keep: sizes differ from step to step."""

    def capture(self, num_sequences: int, max_query: int) -> Any:
        """Graphs are not supported."""
        raise NotImplementedError("torch_sdpa cannot be part of a graph")

    def advance(self, tokens: int) -> Any:
        """There are no draft steps."""
        raise NotImplementedError("an encoder drafts nothing")

    def build(self, step: AttentionStep) -> list[Alike]:
        """Return the metadata of ``step``."""
        starts = step.query_start_host.astype(np.int64)
        counts = np.diff(starts)
        found = []
        for count in np.unique(counts).tolist():
            places = starts[:-1][counts == count][:, None] + np.arange(count)
            found.append(Alike(torch.from_numpy(places).to(self._device), self._mask(count)))
        return found

    def _mask(self, count: int) -> torch.Tensor | None:
        if self._window is None or count <= self._window:
            return None
        place = torch.arange(count, device=self._device)
        return (place - place.unsqueeze(1)).abs() < self._window


class SdpaEncoderLayer:
    """Attention of one layer inside each sequence. A window counts to both sides, the token itself included."""

    def __init__(self, env: AttentionEnv) -> None:
        self._scale = env.request.scale

    def attend_fresh(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKV: torch.Tensor,
        metadata: list[Alike],
        out_THV: torch.Tensor,
    ) -> None:
        """See EncoderLayer."""
        for alike in metadata:
            q_SHND, k_SKND, v_SKNV = (x[alike.places_SN].transpose(1, 2) for x in (q_THD, k_TKD, v_TKV))
            mixed_SHNV = F.scaled_dot_product_attention(
                q_SHND, k_SKND, v_SKNV, attn_mask=alike.mask_NN, scale=self._scale, enable_gqa=True
            )
            out_THV[alike.places_SN] = mixed_SHNV.transpose(1, 2)
