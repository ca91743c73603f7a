"""Latent attention of one layer by Triton kernels. Legend as in ``torch_mla_layer``."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from jackfield.interfaces import AttentionEnv
from jackfield_attention.torch_mla_layer import Cache, MlaLayer, merge
from jackfield_attention.triton_mla_kernels import mla_decode_kernel, mla_merge_kernel, mla_write_kernel
from jackfield_attention.triton_mla_metadata import LongQuery, MlaMetadata, decode_shape
from jackfield_triton.launch import power_of_two

LOG2_E = math.log2(math.e)


class TritonMlaLayer(MlaLayer):
    """Implements :class:`jackfield.interfaces.LatentLayer`."""

    def __init__(self, env: AttentionEnv) -> None:
        super().__init__(env)
        self._rope = int(env.request.extra["rope_size"])
        self._shape = decode_shape(env)
        self._sizes = {
            "R": self._rank,
            "R_WIDTH": max(16, power_of_two(self._rank)),
            "P": self._rope,
            "P_WIDTH": max(16, power_of_two(self._rope)),
        }

    def write(self, latent_TR: torch.Tensor, rope_TP: torch.Tensor, cache: Cache, slots: torch.Tensor) -> None:
        """See LatentLayer."""
        latent_GBJ = cache["latent"]
        if len(slots):
            mla_write_kernel[(len(slots),)](
                latent_TR,
                rope_TP,
                latent_GBJ,
                slots,
                latent_TR.stride(0),
                rope_TP.stride(0),
                *latent_GBJ.stride()[:2],
                PAGE=self._block,
                num_warps=4,
                **self._sizes,
            )

    def attend(  # type: ignore[override]  # metadata is of another kind
        self, q_THD: torch.Tensor, cache: Mapping[str, torch.Tensor], metadata: MlaMetadata, out_THV: torch.Tensor
    ) -> None:
        """See LatentLayer: single tokens absorbed, longer queries expanded."""
        count = metadata.num_decodes
        if count:
            q_NHK, q_NHP = torch.split(q_THD[:count], [self._plain, self._rope], -1)
            q_NHR = torch.einsum("nhk,hkr->nhr", q_NHK, self._k_HKR)
            mixed_NHR = self.decode(torch.cat((q_NHR, q_NHP), -1), cache["latent"], metadata)
            out_THV[:count] = torch.einsum("nhr,hvr->nhv", mixed_NHR, self._v_HVR)
        for query in metadata.long:
            part = slice(query.start, query.stop)
            out_THV[part] = self.expanded_within(q_THD[part], cache, query)

    def decode(self, q_NHJ: torch.Tensor, latent_GBJ: torch.Tensor, metadata: MlaMetadata) -> torch.Tensor:
        """Return [N, H, R], what single tokens mix of latents."""
        count, heads, splits, parts = len(q_NHJ), q_NHJ.shape[1], metadata.splits, metadata.parts
        out_NHR = q_NHJ.new_empty((count, heads, self._rank))
        mla_decode_kernel[(count, -(-heads // self._shape.heads), splits)](
            q_NHJ,
            latent_GBJ,
            out_NHR,
            metadata.lengths,
            metadata.block_table,
            parts.mixed,
            parts.bests,
            parts.totals,
            splits,
            self._scale * LOG2_E,
            *q_NHJ.stride()[:2],
            *latent_GBJ.stride()[:2],
            metadata.block_table.stride(0),
            *out_NHR.stride()[:2],
            HEADS=heads,
            ROWS=self._shape.heads,
            PAGE=self._block,
            TILE=self._shape.tile,
            WHOLE=splits == 1,
            num_warps=8,
            num_stages=2,
            **self._sizes,
        )
        if splits > 1:
            mla_merge_kernel[(count, heads)](
                parts.mixed,
                parts.bests,
                parts.totals,
                out_NHR,
                splits,
                *out_NHR.stride()[:2],
                HEADS=heads,
                R=self._rank,
                R_WIDTH=self._sizes["R_WIDTH"],
                SPLITS=power_of_two(splits),
                num_warps=4,
            )
        return out_NHR

    def expanded_within(self, q_NHD: torch.Tensor, cache: Cache, query: LongQuery) -> torch.Tensor:
        """Return [N, H, V] of one sequence whose length the host knows as a bound only."""
        latents_LJ = self._store.read(cache, "latent", query.pages).flatten(0, 1)[: query.bound]
        places_L = torch.arange(len(latents_LJ), device=latents_LJ.device)
        # What lies behind the sequence may be anything.
        latents_LJ = latents_LJ.masked_fill((places_L >= query.length).unsqueeze(1), 0.0)
        first = query.length - len(q_NHD)
        total = lse = None
        for start in range(0, query.bound, self._part):
            part = slice(start, min(start + self._part, query.bound))
            mixed, sums = self._over(q_NHD, latents_LJ[part], start - first)
            total, lse = (mixed, sums) if total is None or lse is None else merge(total, lse, mixed, sums)
        assert total is not None
        return total.transpose(0, 1).to(q_NHD.dtype)
