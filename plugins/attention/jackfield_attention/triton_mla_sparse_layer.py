"""Latent attention to chosen tokens by Triton kernels. Legend as in ``torch_mla_sparse_layer``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jackfield.interfaces import AttentionEnv
from jackfield_attention.torch_mla_layer import Cache
from jackfield_attention.triton_mla_kernels import mla_write_kernel
from jackfield_attention.triton_mla_layer import LOG2_E, TritonMlaLayer
from jackfield_attention.triton_mla_sparse_kernels import index_scores_kernel, sparse_decode_kernel
from jackfield_attention.triton_mla_sparse_metadata import SparseMlaMetadata, SparseRows
from jackfield_triton.launch import launch_options, power_of_two

NARROWEST = 16
"""Least width of a product's operands."""


class TritonMlaSparseLayer(TritonMlaLayer):
    """Implements :class:`jackfield.interfaces.IndexedLatentLayer`."""

    def __init__(self, env: AttentionEnv) -> None:
        super().__init__(env)
        extra, values = env.request.extra, env.settings.values
        self._topk, self._index_size = int(extra["index_topk"]), int(extra["index_size"])
        self._part_numbers = int(values["part_numbers"])
        narrow = env.request.dtype != "float32"
        self._score_tile = int(values.get("score_tile") or 0) or (128 if narrow else 32)

    def write_index(self, key_TI: torch.Tensor, cache: Cache, slots: torch.Tensor) -> None:
        """See IndexedLatentLayer."""
        index_GBI = cache["index"]
        if len(slots):
            mla_write_kernel[(len(slots),)](
                key_TI,
                key_TI,
                index_GBI,
                slots,
                key_TI.stride(0),
                key_TI.stride(0),
                *index_GBI.stride()[:2],
                R=self._index_size,
                P=0,
                R_WIDTH=power_of_two(self._index_size),
                P_WIDTH=NARROWEST,
                PAGE=self._block,
                num_warps=4,
                **launch_options(self.pdl),
            )

    def choose(
        self, q_TJI: torch.Tensor, weight_TJ: torch.Tensor, cache: Cache, metadata: SparseMlaMetadata
    ) -> list[torch.Tensor]:
        """See IndexedLatentLayer: positions [N, S] for each group of rows. A row that sees fewer tokens has others
        among them, which it does not see.
        """
        found = []
        for rows in metadata.rows:
            q_NJI, weight_NJ = q_TJI[rows.start : rows.stop], weight_TJ[rows.start : rows.stop]
            count = min(self._topk, rows.width)
            chosen_NS = torch.empty((len(q_NJI), count), dtype=torch.int32, device=q_TJI.device)
            for part in self._parts(len(q_NJI), rows.width):
                scores_NL = self.scores(q_NJI, weight_NJ, cache["index"], rows, part)
                chosen_NS[part] = scores_NL.topk(count, sorted=False).indices.to(torch.int32)
            found.append(chosen_NS)
        return found

    def scores(
        self, q_NJI: torch.Tensor, weight_NJ: torch.Tensor, index_GBI: torch.Tensor, rows: SparseRows, part: slice
    ) -> torch.Tensor:
        """Return [N, L] what the indexer gives for all tokens, of the rows ``part``."""
        q_NJI, weight_NJ = q_NJI[part], weight_NJ[part]
        heads, tile = q_NJI.shape[1], self._score_tile
        scores_NL = torch.empty((len(q_NJI), rows.width), dtype=torch.float32, device=q_NJI.device)
        index_scores_kernel[(len(q_NJI), -(-rows.width // tile))](
            q_NJI,
            weight_NJ,
            index_GBI,
            scores_NL,
            rows.seen[part],
            rows.lines(part),
            *q_NJI.stride()[:2],
            weight_NJ.stride(0),
            *index_GBI.stride()[:2],
            rows.table_row,
            scores_NL.stride(0),
            rows.width,
            J=heads,
            J_WIDTH=max(NARROWEST, power_of_two(heads)),
            SIZE=self._index_size,
            WIDTH=max(NARROWEST, power_of_two(self._index_size)),
            PAGE=self._block,
            TILE=tile,
            num_warps=4,
        )
        return scores_NL

    def attend_chosen(
        self,
        q_THD: torch.Tensor,
        chosen: list[torch.Tensor],
        cache: Cache,
        metadata: SparseMlaMetadata,
        out_THV: torch.Tensor,
    ) -> None:
        """See IndexedLatentLayer."""
        self.attend(q_THD, cache, metadata.whole, out_THV)
        heads, width = q_THD.shape[1], self._rank + self._rope
        for rows, chosen_NS in zip(metadata.rows, chosen, strict=True):
            for part in self._parts(rows.stop - rows.start, heads * width):
                q_NHD = q_THD[rows.start : rows.stop][part]
                q_NHK, q_NHP = torch.split(q_NHD, [self._plain, self._rope], -1)
                q_NHR = torch.cat((torch.einsum("nhk,hkr->nhr", q_NHK, self._k_HKR), q_NHP), -1)
                mixed_NHR = self.over_chosen(q_NHR, chosen_NS, cache["latent"], rows, part)
                out_THV[rows.start : rows.stop][part] = torch.einsum("nhr,hvr->nhv", mixed_NHR, self._v_HVR)

    def over_chosen(
        self, q_NHJ: torch.Tensor, chosen_NS: torch.Tensor, latent_GBJ: torch.Tensor, rows: SparseRows, part: slice
    ) -> torch.Tensor:
        """Return [N, H, R], what the rows ``part`` mix of the latents chosen for them."""
        chosen_NS, parts, splits = chosen_NS[part], rows.parts, rows.splits
        (count, heads), shape = q_NHJ.shape[:2], self._shape
        out_NHR = q_NHJ.new_empty((count, heads, self._rank))
        sparse_decode_kernel[(count, -(-heads // shape.heads), splits)](
            q_NHJ,
            latent_GBJ,
            out_NHR,
            rows.seen[part],
            chosen_NS,
            rows.lines(part),
            parts.mixed,
            parts.bests,
            parts.totals,
            chosen_NS.shape[1],
            splits,
            self._scale * LOG2_E,
            *q_NHJ.stride()[:2],
            *latent_GBJ.stride()[:2],
            chosen_NS.stride(0),
            rows.table_row,
            *out_NHR.stride()[:2],
            HEADS=heads,
            ROWS=shape.heads,
            PAGE=self._block,
            TILE=shape.tile,
            WHOLE=splits == 1,
            num_warps=8,
            num_stages=2,
            **self._sizes,
        )
        if splits > 1:
            self.put_together(parts, splits, out_NHR)
        return out_NHR

    def _parts(self, rows: int, numbers: int) -> Iterator[slice]:
        """Yield runs of rows, each of which needs ``numbers`` numbers at once."""
        size = max(1, self._part_numbers // max(1, numbers))
        for start in range(0, rows, size):
            yield slice(start, min(start + size, rows))
