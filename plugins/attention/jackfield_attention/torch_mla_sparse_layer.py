"""Latent attention to tokens that an indexer chooses (DeepSeek-V3.2, arXiv:2512.02556) in plain torch.

Legend: T tokens, N queries of a sequence, H heads, D size of a query head, R latent, P rotated features, V value size,
L tokens of a sequence, J index heads, I size of an index key, S tokens chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from jackfield.interfaces import AttentionEnv, AttentionStep, HostLengths, StepLimits
from jackfield_attention.torch_mla_layer import Cache, MlaLayer
from jackfield_attention.torch_sdpa_layer import SdpaMetadata, SdpaMetadataBuilder

NOBODY = -1
"""Stands where fewer tokens are chosen than may be."""


@dataclass(frozen=True, slots=True)
class SparseQuery:
    """Tokens ``start`` to ``stop`` of the step, the pages of their sequence, its tokens (or a bound of them), and the
    positions [N] of the new ones.
    """

    start: int
    stop: int
    pages: torch.Tensor
    length: int
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class SparseMetadata:
    """One step: sequences in which all tokens are chosen, and those in which some are."""

    whole: SdpaMetadata
    sparse: list[SparseQuery]


class SparseMetadataBuilder:
    """Tells short sequences, in which every token is chosen, from long ones."""

    host_lengths = HostLengths.EXACT

    def __init__(self, env: AttentionEnv) -> None:
        self._topk, self._block = int(env.request.extra["index_topk"]), env.block_size
        self._whole = SdpaMetadataBuilder(env)

    def allocate(self, limits: StepLimits) -> None:
        """Nothing to keep: sizes differ from step to step."""

    def capture(self, num_sequences: int, max_query: int) -> Any:
        """Graphs are not supported."""
        raise NotImplementedError("torch_mla_sparse cannot be part of a graph")

    def advance(self, tokens: int) -> Any:
        """Draft steps are built like any other."""
        raise NotImplementedError("torch_mla_sparse builds every step anew")

    def build(self, step: AttentionStep) -> SparseMetadata:
        """See MetadataBuilder."""
        assert step.lengths_host is not None
        whole = step.lengths_host <= self._topk
        sparse = [sparse_query(step, int(b), self._block) for b in np.flatnonzero(~whole)]
        return SparseMetadata(self._whole.build_some(step, whole), sparse)


def sparse_query(step: AttentionStep, sequence: int, block: int) -> SparseQuery:
    """Return the new tokens of one sequence; its length on the host may be a bound."""
    assert step.lengths_host is not None
    start, stop = (int(place) for place in step.query_start_host[sequence : sequence + 2])
    length = min(int(step.lengths_host[sequence]), step.block_table.shape[1] * block)
    pages = step.block_table[sequence, : -(-length // block)]
    return SparseQuery(start, stop, pages, length, step.positions[start:stop])


class SparseMlaLayer(MlaLayer):
    """Implements :class:`jackfield.interfaces.IndexedLatentLayer` over pages of latents and of index keys."""

    def __init__(self, env: AttentionEnv) -> None:
        super().__init__(env)
        self._topk = int(env.request.extra["index_topk"])
        self._part_numbers = int(env.settings["part_numbers"])

    def write_index(self, key_TI: torch.Tensor, cache: Cache, slots: torch.Tensor) -> None:
        """See IndexedLatentLayer."""
        slots, key_T1I = slots[slots >= 0], key_TI[slots >= 0].unsqueeze(1)
        one_head = {"index": cache["index"].unsqueeze(1)}
        self._store.write(one_head, "index", key_T1I, slots // self._block, slots % self._block)

    def choose(
        self, q_TJI: torch.Tensor, weight_TJ: torch.Tensor, cache: Cache, metadata: SparseMetadata
    ) -> list[torch.Tensor]:
        """See IndexedLatentLayer: positions [N, S] for each sequence in which not all are chosen."""
        return [
            self.choose_in(q_TJI[query.start : query.stop], weight_TJ[query.start : query.stop], cache, query)
            for query in metadata.sparse
        ]

    def choose_in(self, q_NJI: torch.Tensor, weight_NJ: torch.Tensor, cache: Cache, query: SparseQuery) -> torch.Tensor:
        """Return [N, S] the positions that each new token of one sequence attends to."""
        key_LI = self._store.read(cache, "index", query.pages).flatten(0, 1)[: query.length].float()
        places_L = torch.arange(len(key_LI), device=key_LI.device)
        found = []
        for part in self._parts(len(q_NJI), q_NJI.shape[1] * query.length):
            scores_NJL = torch.einsum("nji,li->njl", q_NJI[part].float(), key_LI).relu_()
            scores_NL = torch.einsum("nj,njl->nl", weight_NJ[part], scores_NJL)
            scores_NL.masked_fill_(places_L > query.positions[part].unsqueeze(1), float("-inf"))
            found.append(largest(scores_NL, self._topk))
        return torch.cat(found)

    def attend_chosen(
        self,
        q_THD: torch.Tensor,
        chosen: list[torch.Tensor],
        cache: Cache,
        metadata: SparseMetadata,
        out_THV: torch.Tensor,
    ) -> None:
        """See IndexedLatentLayer."""
        self.attend(q_THD, cache, metadata.whole, out_THV)
        for query, chosen_NS in zip(metadata.sparse, chosen, strict=True):
            rows = slice(query.start, query.stop)
            out_THV[rows] = self.attend_in(q_THD[rows], chosen_NS, cache, query)

    def attend_in(self, q_NHD: torch.Tensor, chosen_NS: torch.Tensor, cache: Cache, query: SparseQuery) -> torch.Tensor:
        """Return [N, H, V] what the new tokens of one sequence mix of the tokens chosen for them."""
        q_plain, q_rope = torch.split(q_NHD, [self._plain, q_NHD.shape[-1] - self._plain], -1)
        q_NHR = torch.cat((torch.einsum("nhk,hkr->nhr", q_plain, self._k_HKR), q_rope), -1)
        mixed_NHR = q_NHD.new_empty((*q_NHD.shape[:2], self._rank))
        for part in self._parts(len(q_NHD), chosen_NS.shape[1] * (q_NHR.shape[2] + q_NHR.shape[1])):
            mixed_NHR[part] = self._over_chosen(q_NHR[part], chosen_NS[part], cache, query)
        return torch.einsum("nhr,hvr->nhv", mixed_NHR, self._v_HVR)

    def _over_chosen(
        self, q_NHR: torch.Tensor, chosen_NS: torch.Tensor, cache: Cache, query: SparseQuery
    ) -> torch.Tensor:
        missing_NS = chosen_NS == NOBODY
        places_NS = chosen_NS.clamp(min=0)
        one_head = {"latent": cache["latent"].unsqueeze(1)}
        pages_NS = query.pages[places_NS // self._block]
        latent_NSR = self._store.pick(one_head, "latent", pages_NS, places_NS % self._block).squeeze(2)
        scores_NHS = torch.einsum("nhr,nsr->nhs", q_NHR, latent_NSR).float() * self._scale
        weights_NHS = scores_NHS.masked_fill_(missing_NS.unsqueeze(1), float("-inf")).softmax(-1)
        return torch.einsum("nhs,nsr->nhr", weights_NHS.to(latent_NSR.dtype), latent_NSR[..., : self._rank])

    def _parts(self, rows: int, numbers: int) -> Iterator[slice]:
        """Yield runs of rows, each of which needs ``numbers`` numbers at once."""
        size = max(1, self._part_numbers // max(1, numbers))
        for start in range(0, rows, size):
            yield slice(start, min(start + size, rows))


def largest(scores_NL: torch.Tensor, count: int) -> torch.Tensor:
    """Return [N, S] int64 the places of the ``count`` largest scores of each row, ascending, then :data:`NOBODY`.

    Scores of minus infinity are never chosen. Of equal ones the first are, so that what is chosen depends neither on
    how many rows are scored at once nor on what lies behind the last place.
    """
    seen_NL = scores_NL > float("-inf")
    count = min(count, scores_NL.shape[1])
    least_N1 = scores_NL.topk(count, sorted=False).values.amin(-1, keepdim=True)
    above_NL = scores_NL > least_N1
    equal_NL = (scores_NL == least_N1) & seen_NL
    room_N1 = count - above_NL.sum(-1, keepdim=True)
    chosen_NL = above_NL | (equal_NL & (equal_NL.cumsum(-1) <= room_N1))
    rows, places = chosen_NL.nonzero(as_tuple=True)
    found_NS = places.new_full((len(scores_NL), count), NOBODY)
    found_NS[rows, (chosen_NL.cumsum(-1) - 1)[rows, places]] = places
    return found_NS
