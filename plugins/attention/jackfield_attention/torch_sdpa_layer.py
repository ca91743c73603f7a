"""Paged attention in plain torch.

Short queries (decode, verification of drafts) become *rows*: each new token with the tokens it sees. The blocks that
rows see are laid out one after another,
whichever row they belong to, and go through two batched products; the softmax is put together per row afterwards. So
the work grows with the sum of lengths:
nothing is padded to the longest sequence and nothing loops over requests. Long queries (prefill) go through
scaled_dot_product_attention one by one.

Legend: T tokens, R rows, C blocks of all rows, P block size, H query heads, K cache heads, G = H / K, D head size, V
value size, L tokens seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from jackfield.interfaces import AttentionEnv, AttentionStep, HostLengths, StepLimits
from jackfield_attention.torch_store import make_store
from jackfield_attention.tree_cells import tree_cells

ROW_LIMIT = 8
"""Queries of up to this many tokens are handled as rows."""


@dataclass(slots=True)
class Rows:
    """Rows of all short queries: tokens [R] their places in the step, owners [C] the row of each block, pages [C].

    hidden_CP says which cells of the blocks a row must not see; hidden_blocks and hidden_places list the same cells.
    What they hold is somebody else's, or was never written: it may be NaN, which no weight of zero takes away.
    distance_CP is how far behind the row's token each cell lies, negated; only where biases depend on it. queries_C
    says which rotation of a row's query a block meets, where there are several.
    """

    tokens: torch.Tensor
    owners: torch.Tensor
    pages: torch.Tensor
    hidden_CP: torch.Tensor
    hidden_blocks: torch.Tensor
    hidden_places: torch.Tensor
    count: int
    distance_CP: torch.Tensor | None = None
    queries_C: torch.Tensor | None = None


@dataclass(slots=True)
class Views:
    """Ranges of tokens that rows see, [W] each: the row, the first token, the end, the rotation of its query."""

    row: np.ndarray[Any, Any]
    first: np.ndarray[Any, Any]
    end: np.ndarray[Any, Any]
    query: np.ndarray[Any, Any] | None = None


@dataclass(slots=True)
class Long:
    """One long query: tokens of the step [start, stop), pages of its blocks, tokens seen, and a mask [N, L] or None
    for plain causal. distance_NL is as in :class:`Rows`; it comes with a mask.
    """

    start: int
    stop: int
    pages: torch.Tensor
    length: int
    mask_NL: torch.Tensor | None
    distance_NL: torch.Tensor | None = None


@dataclass(slots=True)
class SdpaMetadata:
    """One step: rows and long queries."""

    rows: Rows | None
    long: list[Long]


class SdpaMetadataBuilder:
    """Sorts a step into rows and long queries with array arithmetic."""

    host_lengths = HostLengths.EXACT

    def __init__(self, env: AttentionEnv) -> None:
        self._block = env.block_size
        self._window = env.request.window
        self._chunked = env.request.kind == "chunked_local"
        self._biased = "alibi" in env.request.needs
        self._device = env.device

    def allocate(self, limits: StepLimits) -> None:
        """Nothing to keep: sizes differ from step to step."""

    def capture(self, num_sequences: int, max_query: int) -> Any:
        """Graphs are not supported."""
        raise NotImplementedError("torch_sdpa cannot be part of a graph")

    def advance(self, tokens: int) -> Any:
        """Draft steps are built like any other."""
        raise NotImplementedError("torch_sdpa builds every step anew")

    def build(self, step: AttentionStep) -> SdpaMetadata:
        """Return the metadata of ``step``."""
        return self.build_some(step, np.ones(step.num_sequences, dtype=np.bool_))

    def build_some(self, step: AttentionStep, wanted: np.ndarray[Any, Any]) -> SdpaMetadata:
        """Return the metadata of those sequences of ``step`` that are wanted, [B] bool."""
        assert step.lengths_host is not None
        starts = step.query_start_host.astype(np.int64)
        counts = np.diff(starts)
        lengths = step.lengths_host.astype(np.int64)
        short = np.flatnonzero(wanted & (counts <= ROW_LIMIT))
        rows = self._rows(step, short, starts, counts, lengths) if len(short) else None
        long = [
            piece
            for b in np.flatnonzero(wanted & (counts > ROW_LIMIT))
            for piece in self._pieces(step, int(b), int(starts[b]), int(starts[b + 1]), int(lengths[b]))
        ]
        return SdpaMetadata(rows, long)

    def _rows(
        self,
        step: AttentionStep,
        short: np.ndarray[Any, Any],
        starts: np.ndarray[Any, Any],
        counts: np.ndarray[Any, Any],
        lengths: np.ndarray[Any, Any],
    ) -> Rows:
        block = self._block
        sequence = np.repeat(short, counts[short])
        within = ranges(counts[short])
        tokens = starts[sequence] + within
        seen = lengths[sequence] - counts[sequence] + within + 1
        text = seen - 1 if step.tree is None else step.tree.positions_host[tokens]
        views = replace(self._views(text + 1), end=seen) if step.tree is not None else self._views(seen)
        first_block = views.first // block
        blocks = (views.end + block - 1) // block - first_block
        which = np.repeat(np.arange(len(views.row)), blocks)
        owners = views.row[which]
        index = first_block[which] + ranges(blocks)
        position = index[:, None] * block + np.arange(block)
        hidden = position >= views.end[which, None]
        if step.tree is not None:
            shown, position = tree_cells(step, step.tree, sequence[owners], tokens[owners], position)
            hidden |= ~shown
        hidden |= position < views.first[which, None]
        pages = step.block_table[self._tensor(sequence[owners]), self._tensor(index)]
        in_blocks, places = (self._tensor(part) for part in np.nonzero(hidden))
        distance = self._tensor(position - text[owners, None]) if self._biased else None
        return Rows(
            self._tensor(tokens),
            self._tensor(owners),
            pages,
            self._tensor(hidden),
            in_blocks,
            places,
            len(seen),
            distance,
            None if views.query is None else self._tensor(views.query[which]),
        )

    def _views(self, seen: np.ndarray[Any, Any]) -> Views:
        """Return what rows see that end at ``seen``."""
        return Views(np.arange(len(seen)), np.maximum(self._first_seen(seen - 1), 0), seen)

    def _pieces(self, step: AttentionStep, sequence: int, start: int, stop: int, length: int) -> Iterator[Long]:
        """Yield one long query in the pieces that are handled one by one."""
        yield self._long(step, sequence, start, stop, length)

    def _long(self, step: AttentionStep, sequence: int, start: int, stop: int, length: int) -> Long:
        block, count = self._block, stop - start
        first = max(0, self._first_seen(length - count)) // block
        pages = step.block_table[sequence, first : (length + block - 1) // block]
        mask_NL = distance_NL = None
        if step.tree is not None or count < length or self._window or self._biased:
            mask_NL, seen, mine = self._shown(step, sequence, start, stop, range(first * block, length))
            if self._window:
                mask_NL &= seen >= self._first_seen(mine)
            distance_NL = seen - mine if self._biased else None
        return Long(start, stop, pages, length - first * block, mask_NL, distance_NL)

    def _shown(
        self, step: AttentionStep, sequence: int, start: int, stop: int, places: range
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return [N, L] what new tokens see of places, and the positions in the text of both: of these [N or 1, L], of
        those [N, 1].
        """
        if step.tree is None:
            seen = torch.arange(places.start, places.stop, device=self._device)
            mine = torch.arange(places.stop - (stop - start), places.stop, device=self._device).unsqueeze(1)
            return seen <= mine, seen, mine
        tokens = np.arange(start, stop)
        owners, line = np.full(stop - start, sequence), np.arange(places.start, places.stop)[None]
        shown, text = tree_cells(step, step.tree, owners, tokens, line)
        mine = self._tensor(step.tree.positions_host[start:stop]).unsqueeze(1)
        return self._tensor(shown), self._tensor(text), mine

    def _first_seen(self, position: Any) -> Any:
        """Return the first position that a token sees; below 0 where it sees all."""
        if not self._window:
            return position * 0
        return position // self._window * self._window if self._chunked else position - self._window + 1

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


class SdpaLayer:
    """Attention of one layer over pages ``[pages, K, P, D]``."""

    def __init__(self, env: AttentionEnv) -> None:
        self._scale = env.request.scale
        self._softcap = env.request.softcap
        self._slopes_H = env.alibi_slopes
        self._sinks_H = env.sinks
        self._block = env.block_size
        dtype = getattr(torch, env.request.dtype)
        scales = {"k": env.k_scale, "v": env.v_scale}
        self._store = make_store(env.request.cache_dtype or env.request.dtype, dtype, scales)

    def write(
        self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: Mapping[str, torch.Tensor], slots: torch.Tensor
    ) -> None:
        """See AttentionLayer."""
        pages, places = slots // self._block, slots % self._block
        if bool((slots < 0).any()):
            keep = slots >= 0
            pages, places, k_TKD, v_TKD = pages[keep], places[keep], k_TKD[keep], v_TKD[keep]
        self._store.write(cache, "k", k_TKD, pages, places)
        self._store.write(cache, "v", v_TKD, pages, places)

    def attend(
        self, q_THD: torch.Tensor, cache: Mapping[str, torch.Tensor], metadata: SdpaMetadata, out_THD: torch.Tensor
    ) -> None:
        """See AttentionLayer."""
        if metadata.rows is not None:
            rows = metadata.rows
            if rows.count == len(q_THD):
                self.attend_rows(q_THD, cache, rows, out_THD)
            else:
                part = torch.empty((rows.count, *out_THD.shape[1:]), dtype=out_THD.dtype, device=out_THD.device)
                self.attend_rows(q_THD[rows.tokens], cache, rows, part)
                out_THD[rows.tokens] = part
        for query in metadata.long:
            self._attend_long(q_THD[query.start : query.stop], cache, query, out_THD[query.start : query.stop])

    def attend_rows(
        self, q_RHD: torch.Tensor, cache: Mapping[str, torch.Tensor], rows: Rows, out_RHV: torch.Tensor
    ) -> None:
        """Attend from rows [R, H, D] over pages ``k`` and ``v``; writes ``out`` [R, H, V]."""
        k_CKPD, v_CKPV = (self._store.read(cache, name, rows.pages) for name in ("k", "v"))
        v_CKPV[rows.hidden_blocks, :, rows.hidden_places] = 0
        q_CKGD = self._by_block(q_RHD * self._scale, rows, k_CKPD.shape[1])
        scores_CKGP = q_CKGD @ k_CKPD.transpose(-1, -2)
        if self._softcap:
            scores_CKGP = torch.tanh(scores_CKGP / self._softcap) * self._softcap
        if rows.distance_CP is not None:
            scores_CKGP += self._bias(rows.distance_CP[:, None, None, :], scores_CKGP.shape[1:3], scores_CKGP.dtype)
        scores_CKGP.masked_fill_(rows.hidden_CP[:, None, None, :], float("-inf"))
        best_CKG = scores_CKGP.amax(-1)
        best_RKG = best_CKG.new_full((rows.count, *best_CKG.shape[1:]), float("-inf"))
        if self._sinks_H is not None:
            best_RKG.copy_(self._sinks_H.view(best_RKG.shape[1:]))
        best_RKG.scatter_reduce_(0, rows.owners.view(-1, 1, 1).expand_as(best_CKG), best_CKG, "amax")
        weights_CKGP = scores_CKGP.sub_(best_RKG.index_select(0, rows.owners).unsqueeze(-1)).exp_()
        total_RKG = torch.zeros_like(best_RKG)
        if self._sinks_H is not None:
            total_RKG = torch.exp(self._sinks_H.view(best_RKG.shape[1:]) - best_RKG).to(best_RKG.dtype)
        total_RKG.index_add_(0, rows.owners, weights_CKGP.sum(-1))
        mixed_RKGV = torch.zeros((*best_RKG.shape, v_CKPV.shape[-1]), dtype=q_RHD.dtype, device=q_RHD.device)
        mixed_RKGV.index_add_(0, rows.owners, weights_CKGP @ v_CKPV)
        torch.div(mixed_RKGV.flatten(1, 2), total_RKG.flatten(1).unsqueeze(-1), out=out_RHV)

    def _by_block(self, q_RHD: torch.Tensor, rows: Rows, heads: int) -> torch.Tensor:
        """Return the queries [C, K, G, D] that blocks meet."""
        return q_RHD.view(len(q_RHD), heads, -1, q_RHD.shape[-1]).index_select(0, rows.owners)

    def _attend_long(
        self, q_NHD: torch.Tensor, cache: Mapping[str, torch.Tensor], query: Long, out_NHV: torch.Tensor
    ) -> None:
        pages = (self._store.read(cache, name, query.pages) for name in ("k", "v"))
        k_KLD, v_KLV = (sequence_of(part, query.length) for part in pages)
        q_HND = q_NHD.transpose(0, 1)
        if self._softcap or self._sinks_H is not None:
            out_NHV.copy_(self._written_out(q_HND, k_KLD, v_KLV, query).transpose(0, 1))
            return
        mask = query.mask_NL
        if query.distance_NL is not None and mask is not None:
            bias_HNL = self._bias(query.distance_NL, (len(q_HND), 1), q_HND.dtype)
            mask = bias_HNL.masked_fill_(~mask, float("-inf")).unsqueeze(0)
        mixed_HNV = F.scaled_dot_product_attention(
            q_HND.unsqueeze(0),
            k_KLD.unsqueeze(0),
            v_KLV.unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=True,
        )
        out_NHV.copy_(mixed_HNV[0].transpose(0, 1))

    def _bias(self, distance: torch.Tensor, heads: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return linear biases (ALiBi, arXiv:2108.12409): slopes, seen as ``heads``, times distances."""
        assert self._slopes_H is not None, "a layer that needs alibi is built with slopes"
        return (self._slopes_H.view(*heads, 1) * distance).to(dtype)

    def _written_out(self, q_HND: torch.Tensor, k_KLD: torch.Tensor, v_KLV: torch.Tensor, query: Long) -> torch.Tensor:
        groups = len(q_HND) // len(k_KLD)
        scores_HNL = q_HND @ k_KLD.repeat_interleave(groups, 0).transpose(1, 2) * self._scale
        if self._softcap:
            scores_HNL = torch.tanh(scores_HNL / self._softcap) * self._softcap
        mask_NL = query.mask_NL
        if mask_NL is None:
            mask_NL = torch.ones(scores_HNL.shape[1:], dtype=torch.bool, device=q_HND.device).tril()
        scores_HNL = scores_HNL.masked_fill(~mask_NL, float("-inf"))
        if self._sinks_H is not None:
            sinks_HN1 = self._sinks_H.to(q_HND.dtype).view(-1, 1, 1).expand(-1, q_HND.shape[1], 1)
            scores_HNL = torch.cat((scores_HNL, sinks_HN1), -1)
        weights_HNL = scores_HNL.softmax(-1)[..., : k_KLD.shape[1]]
        return weights_HNL @ v_KLV.repeat_interleave(groups, 0)


def sequence_of(pages_CKPD: torch.Tensor, length: int) -> torch.Tensor:
    """Return one sequence's ``[K, L, D]`` out of its pages."""
    return pages_CKPD.transpose(0, 1).flatten(1, 2)[:, :length]


def ranges(counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return ``[0..counts[0]), [0..counts[1]), ...`` in one array."""
    total = int(counts.sum())
    within: np.ndarray[Any, Any] = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return within
