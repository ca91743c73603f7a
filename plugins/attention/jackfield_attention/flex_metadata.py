"""Masks of ``flex``: which of the keys that lie one after another each new token sees.

Legend: T tokens, B sequences, C pages of all sequences, P block size, S = C * P keys that are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import BlockMask

from jackfield.interfaces import MOST_BRANCHES, AttentionEnv, AttentionStep, HostLengths, StepLimits, TreeMask
from jackfield_attention.torch_sdpa_layer import ranges
from jackfield_attention.tree_cells import text_positions

TILE = 128
"""Tokens and keys of a block of the mask."""
Ints = npt.NDArray[np.int64]
Visible = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Which positions of keys a position sees, in one sequence."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens or keys, one after another: the sequence of each (-1: nobody's), and its position in it."""

    owners: Ints
    positions: Ints


@dataclass(frozen=True, slots=True)
class FlexMetadata:
    """One step.

    Args:
        mask: blocks that are looked at, and what is seen in them. q_T, k_S: positions. pages: [C] that are gathered, of
            which the cells ``hidden_pages``, ``hidden_places`` are nobody's.
    """

    mask: BlockMask
    q_T: torch.Tensor
    k_S: torch.Tensor
    pages: torch.Tensor | None = None
    hidden_pages: torch.Tensor | None = None
    hidden_places: torch.Tensor | None = None


class FlexMetadataBuilder:
    """Builds the metadata of one group of layers."""

    host_lengths = HostLengths.EXACT

    def __init__(self, env: AttentionEnv) -> None:
        request = env.request
        self._block, self._device, self._window = env.block_size, env.device, request.window
        self._kind = request.kind

    def allocate(self, limits: StepLimits) -> None:
        """Nothing to keep: sizes differ from step to step."""

    def capture(self, num_sequences: int, max_query: int) -> Any:
        """Graphs are not supported."""
        raise NotImplementedError("flex cannot be part of a graph")

    def advance(self, tokens: int) -> Any:
        """Draft steps are built like any other."""
        raise NotImplementedError("flex builds every step anew")

    def build(self, step: AttentionStep) -> FlexMetadata:
        """See MetadataBuilder."""
        starts = step.query_start_host.astype(np.int64)
        counts = np.diff(starts)
        sequences = np.repeat(np.arange(len(counts)), counts)
        if self._kind == "encoder":
            rows = Rows(sequences, ranges(counts))
            return self._metadata(rows, rows)
        assert step.lengths_host is not None
        lengths = step.lengths_host.astype(np.int64)
        places = (lengths - counts)[sequences] + ranges(counts)
        q = Rows(sequences, places if step.tree is None else step.tree.positions_host)
        first = np.maximum(self._first_seen(lengths - counts), 0)
        blocks = -(-lengths // self._block) - first // self._block
        owners = np.repeat(np.arange(len(counts)), blocks)
        index = (first // self._block)[owners] + ranges(blocks)
        positions = index[:, None] * self._block + np.arange(self._block)
        hidden = (positions < first[owners, None]) | (positions >= lengths[owners, None])
        text = positions if step.tree is None else text_positions(step, step.tree, owners, positions)
        k = Rows(np.where(hidden, -1, owners[:, None]).ravel(), text.ravel())
        pages = step.block_table[self._send(owners), self._send(index)]
        gathered = (pages, *(self._send(part) for part in np.nonzero(hidden)))
        if step.tree is None:
            return self._metadata(q, k, *gathered)
        return self._metadata(q, k, *gathered, branches=(step.tree, self._send(positions.ravel())))

    def _metadata(
        self, q: Rows, k: Rows, *gathered: torch.Tensor, branches: tuple[TreeMask, torch.Tensor] | None = None
    ) -> FlexMetadata:
        q_positions, k_positions = self._send(q.positions), self._send(k.positions)
        sees = seen_by(self._send(q.owners), self._send(k.owners), q_positions, k_positions, self._visible())
        if branches is not None:
            tree, places_S = branches
            sees = branched(sees, tree.base, tree.bits, places_S)
        counts, indices = (self._send(part) for part in self._blocks(q, k, windows=branches is None))
        sizes = len(q.owners), len(k.owners)
        mask = BlockMask.from_kv_blocks(
            counts.view(1, 1, -1),
            indices.view(1, 1, *indices.shape),
            BLOCK_SIZE=TILE,
            mask_mod=sees,
            seq_lengths=sizes,
            compute_q_blocks=False,
        )
        return FlexMetadata(mask, q_positions, k_positions, *gathered)

    def _blocks(self, q: Rows, k: Rows, *, windows: bool) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return how many blocks of keys each block of tokens looks at, and which come first: a run from the first key
        of its first token's sequence (with ``windows``, that this token sees: those behind it see none before) to the
        last key of its last token's sequence.
        """
        tokens, keys = len(q.owners), len(k.owners)
        firsts = np.arange(0, tokens, TILE)
        lasts = np.minimum(firsts + TILE, tokens) - 1
        mine = np.flatnonzero(k.owners >= 0)
        start = np.searchsorted(k.owners[mine], q.owners[firsts])
        stop = np.searchsorted(k.owners[mine], q.owners[lasts], side="right")
        skipped = np.maximum(self._first_seen(q.positions[firsts]) - k.positions[mine[start]], 0)
        low = mine[start + skipped * windows] // TILE
        high = mine[stop - 1] // TILE
        width = -(-keys // TILE)
        indices = (low[:, None] + np.arange(width)) % width
        return (high - low + 1).astype(np.int32), indices.astype(np.int32)

    def _first_seen(self, position: Ints) -> Ints:
        """Return the first position that a token sees; below 0 where it sees all."""
        if not self._window:
            return position * 0
        if self._kind == "chunked_local":
            return position // self._window * self._window
        return position - self._window + 1

    def _visible(self) -> Visible:
        window = self._window or 0
        if self._kind == "encoder":
            return (lambda q, k: (q - k).abs() < window) if window else (lambda q, k: q == q)
        if self._kind == "chunked_local" and window:
            return lambda q, k: (k <= q) & (k >= q // window * window)
        return (lambda q, k: (k <= q) & (k > q - window)) if window else (lambda q, k: k <= q)

    def _send(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def seen_by(
    q_owner_T: torch.Tensor, k_owner_S: torch.Tensor, q_T: torch.Tensor, k_S: torch.Tensor, visible: Visible
) -> Callable[..., torch.Tensor]:
    """Return a mask as flex_attention takes it: of (batch, head, token, key), whether the token sees the key."""

    def sees(batch: torch.Tensor, head: torch.Tensor, token: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (q_owner_T[token] == k_owner_S[key]) & visible(q_T[token], k_S[key])

    return sees


def branched(
    sees: Callable[..., torch.Tensor], base_T: torch.Tensor, bits_T: torch.Tensor, places_S: torch.Tensor
) -> Callable[..., torch.Tensor]:
    """Return the mask where drafts branch; see TreeMask. ``places_S``: where keys are stored."""

    def sees_branch(batch: torch.Tensor, head: torch.Tensor, token: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        shift = places_S[key] - base_T[token]
        bit = (bits_T[token] >> shift.clamp(0, MOST_BRANCHES - 1)) & 1
        return sees(batch, head, token, key) & ((shift < 0) | ((shift < MOST_BRANCHES) & (bit > 0)))

    return sees_branch
