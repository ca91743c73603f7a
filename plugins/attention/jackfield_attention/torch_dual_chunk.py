"""Dual-chunk attention (arXiv:2402.17463) over pages: a query comes rotated three times, and keys of its own chunk, of
the chunk before and of all earlier ones meet one rotation each, in one softmax.

Legend: T tokens, R rows, C blocks of all rows, P block size, N tokens of a piece, H query heads, K cache heads,
G = H / K, D head size, V value size, L tokens seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from jackfield.interfaces import AttentionEnv, AttentionStep
from jackfield_attention.torch_sdpa_layer import Long, Rows, SdpaLayer, SdpaMetadataBuilder, Views, sequence_of

OWN, BEFORE, EARLIER = range(3)
"""Rotations of a query, by the chunk of the keys they are for."""
PIECE = 256
"""Tokens of a long query that are handled together."""
TILE = 1024
"""Keys that they meet at once: with them the largest matrix of scores."""


@dataclass(slots=True)
class ChunkPiece(Long):
    """A part of a long query inside one chunk; ranges: (rotation, first token, end) of the keys it meets."""

    ranges: tuple[tuple[int, int, int], ...] = ()


class DualChunkMetadataBuilder(SdpaMetadataBuilder):
    """Cuts what each token sees at the edges of chunks."""

    def __init__(self, env: AttentionEnv) -> None:
        super().__init__(env)
        self._chunk = int(env.request.extra["chunk_length"])

    def _views(self, seen: np.ndarray[Any, Any]) -> Views:
        """See the base class: up to three ranges for each row; those without tokens have no blocks."""
        own = (seen - 1) // self._chunk * self._chunk
        before = np.maximum(own - self._chunk, 0)
        rows, none = np.arange(len(seen)), np.zeros_like(seen)
        first, end = np.concatenate((own, before, none)), np.concatenate((seen, own, before))
        there = first < end
        rotations = np.repeat((OWN, BEFORE, EARLIER), len(seen))
        return Views(np.tile(rows, 3)[there], first[there], end[there], rotations[there])

    def _pieces(self, step: AttentionStep, sequence: int, start: int, stop: int, length: int) -> Iterator[Long]:
        """See the base class: pieces that no edge of a chunk goes through."""
        first = length - (stop - start)
        while start < stop:
            end = min((first // self._chunk + 1) * self._chunk, first + PIECE, length)
            pages = step.block_table[sequence, : -(-end // self._block)]
            yield ChunkPiece(start, start + end - first, pages, end, None, None, self._ranges(first, end))
            start, first = start + end - first, end

    def _ranges(self, first: int, end: int) -> tuple[tuple[int, int, int], ...]:
        own = first // self._chunk * self._chunk
        before = max(own - self._chunk, 0)
        ranges = ((OWN, own, end), (BEFORE, before, own), (EARLIER, 0, before))
        return tuple(part for part in ranges if part[1] < part[2])


class DualChunkLayer(SdpaLayer):
    """Attention of one layer; queries are [T, 3 H, D], the heads of one rotation after those of another."""

    def _by_block(self, q_RSD: torch.Tensor, rows: Rows, heads: int) -> torch.Tensor:
        """See the base class."""
        assert rows.queries_C is not None, "rows of dual-chunk attention say which rotation they meet"
        q_XKGD = torch.unflatten(q_RSD, 1, (3, heads, -1)).flatten(0, 1)
        return q_XKGD.index_select(0, rows.owners * 3 + rows.queries_C)

    def _attend_long(
        self, q_NSD: torch.Tensor, cache: Mapping[str, torch.Tensor], query: Long, out_NHV: torch.Tensor
    ) -> None:
        """See the base class; tiles of keys are folded into running sums (arXiv:2205.14135)."""
        assert isinstance(query, ChunkPiece)
        k_KLD, v_KLV = (sequence_of(self._store.read(cache, name, query.pages), query.length) for name in ("k", "v"))
        wide = torch.promote_types(q_NSD.dtype, torch.float32)
        q_N3KGD = torch.unflatten(q_NSD * self._scale, 1, (3, len(k_KLD), -1))
        q_3KXD = q_N3KGD.permute(1, 2, 3, 0, 4).flatten(2, 3)
        best_KX1 = q_3KXD.new_full((*q_3KXD.shape[1:3], 1), float("-inf"), dtype=wide)
        total_KX1 = torch.zeros_like(best_KX1)
        mixed_KXV = best_KX1.new_zeros((*best_KX1.shape[:2], v_KLV.shape[-1]))
        for rotation, start, end in query.ranges:
            for first in range(start, end, TILE):
                part = slice(first, min(first + TILE, end))
                scores_KXL = (q_3KXD[rotation] @ k_KLD[:, part].transpose(1, 2)).to(wide)
                if rotation == OWN:
                    scores_KXL.masked_fill_(
                        self._later(part, query).repeat(q_3KXD.shape[2] // len(q_NSD), 1), -torch.inf
                    )
                # The first tile holds the first token of the own chunk, which all see: no best is ever infinite.
                higher = torch.maximum(best_KX1, scores_KXL.amax(-1, keepdim=True))
                keep, weights_KXL = (best_KX1 - higher).exp(), (scores_KXL - higher).exp()
                total_KX1 = total_KX1 * keep + weights_KXL.sum(-1, keepdim=True)
                mixed_KXV = mixed_KXV * keep + weights_KXL @ v_KLV[:, part].to(wide)
                best_KX1 = higher
        mixed_KGNV = torch.unflatten(mixed_KXV / total_KX1, 1, (-1, len(q_NSD)))
        out_NHV.copy_(mixed_KGNV.flatten(0, 1).transpose(0, 1))

    def _later(self, part: slice, query: ChunkPiece) -> torch.Tensor:
        """Return [N, L] which keys come after each token of the piece."""
        count, device = query.stop - query.start, query.pages.device
        mine = torch.arange(query.length - count, query.length, device=device).unsqueeze(1)
        return torch.arange(part.start, part.stop, device=device) > mine
