"""Multi-head latent attention (arXiv:2405.04434) in plain torch.

Both forms give the same: expanded, where the latents of the context become keys and values of all heads; absorbed,
where queries are taken into the space of the latents, and what they mix is taken out of it. The first is cheaper for
many queries on a context, the second for few.

Legend: T tokens, N queries of a sequence, H heads, D = K + P size of a query head, K features without and P with
rotation, R latent, V value size, L tokens seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from jackfield.interfaces import AttentionEnv
from jackfield_attention.torch_sdpa_layer import Long, SdpaLayer, SdpaMetadata
from jackfield_attention.torch_store import make_store

Cache = Mapping[str, torch.Tensor]


class MlaLayer:
    """One layer over pages of latents ``[pages, block, R + P]``."""

    def __init__(self, env: AttentionEnv) -> None:
        request = env.request
        self._rank, self._scale, self._block = int(request.extra["latent_size"]), request.scale, env.block_size
        self._plain = request.head_size - int(request.extra["rope_size"])
        self._part = max(1, int(env.settings["context_part"]))
        # A latent is keys and values at once, and has one scale.
        self._latents = SdpaLayer(replace(env, v_scale=env.k_scale))
        scales = {"latent": env.k_scale}
        self._store = make_store(request.cache_dtype or request.dtype, getattr(torch, request.dtype), scales)

    def bind(self, kv_up: Any) -> None:
        """See LatentLayer."""
        weight_HJR = kv_up.scheme.dequantize(kv_up).view(-1, self._plain + self._value(kv_up), self._rank)
        self._kv_HJR = weight_HJR
        self._k_HKR, self._v_HVR = torch.split(weight_HJR, [self._plain, weight_HJR.shape[1] - self._plain], 1)

    def _value(self, kv_up: Any) -> int:
        return int(kv_up.info.shards[0].unit) - self._plain

    def write(self, latent_TR: torch.Tensor, rope_TP: torch.Tensor, cache: Cache, slots: torch.Tensor) -> None:
        """See LatentLayer."""
        slots, keep = slots[slots >= 0], slots >= 0
        rows_T1J = torch.cat((latent_TR, rope_TP), -1)[keep].unsqueeze(1)
        one_head = {"latent": cache["latent"].unsqueeze(1)}
        self._store.write(one_head, "latent", rows_T1J, slots // self._block, slots % self._block)

    def attend(self, q_THD: torch.Tensor, cache: Cache, metadata: SdpaMetadata, out_THV: torch.Tensor) -> None:
        """See LatentLayer: rows absorbed, long queries expanded."""
        if metadata.rows is not None:
            tokens = metadata.rows.tokens
            out_THV[tokens] = self.absorbed(q_THD[tokens], cache, metadata)
        for query in metadata.long:
            part = slice(query.start, query.stop)
            out_THV[part] = self.expanded(q_THD[part], cache, query)

    def absorbed(self, q_NHD: torch.Tensor, cache: Cache, metadata: SdpaMetadata) -> torch.Tensor:
        """Return [N, H, V] of all rows: attention with one key head of R + P, whose values are the latents."""
        assert metadata.rows is not None
        latent_GPR = cache["latent"].unsqueeze(1)
        q_plain, q_rope = torch.split(q_NHD, [self._plain, q_NHD.shape[-1] - self._plain], -1)
        q_NHR = torch.cat((torch.einsum("nhk,hkr->nhr", q_plain, self._k_HKR), q_rope), -1)
        mixed_NHR = q_NHR.new_empty((*q_NHR.shape[:2], self._rank))
        planes = {"k": latent_GPR, "v": latent_GPR[..., : self._rank]}
        self._latents.attend_rows(q_NHR, planes, metadata.rows, mixed_NHR)
        return torch.einsum("nhr,hvr->nhv", mixed_NHR, self._v_HVR)

    def expanded(self, q_NHD: torch.Tensor, cache: Cache, query: Long) -> torch.Tensor:
        """Return [N, H, V] of one sequence; parts of the context are merged by their log-sum-exps."""
        latents_LJ = self._store.read(cache, "latent", query.pages).flatten(0, 1)[: query.length]
        first = query.length - len(q_NHD)
        total = lse = None
        for start in range(0, query.length, self._part):
            part = slice(start, min(start + self._part, query.length))
            seen_NL = None if query.mask_NL is None else query.mask_NL[:, part]
            mixed, sums = self._over(q_NHD, latents_LJ[part], start - first, seen_NL)
            total, lse = (mixed, sums) if total is None or lse is None else merge(total, lse, mixed, sums)
        assert total is not None
        return total.transpose(0, 1).to(q_NHD.dtype)

    def _over(
        self,
        q_NHD: torch.Tensor,
        latents_LJ: torch.Tensor,
        offset: int | torch.Tensor,
        seen_NL: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what queries mix of a part of the context, [H, N, V], and log-sum-exps [H, N]. ``offset``: place of
        the part's first token, seen from the first query. ``seen_NL``: what is seen, where it is not all before.
        """
        latent_LR, rope_LP = torch.split(latents_LJ, [self._rank, latents_LJ.shape[-1] - self._rank], -1)
        q_HNK, q_HNP = torch.split(q_NHD.transpose(0, 1), [self._plain, q_NHD.shape[-1] - self._plain], -1)
        k_HLK = torch.einsum("lr,hkr->hlk", latent_LR, self._k_HKR)
        v_HLV = torch.einsum("lr,hvr->hlv", latent_LR, self._v_HVR)
        scores_HNL = (q_HNK @ k_HLK.transpose(1, 2) + q_HNP @ rope_LP.T).float() * self._scale
        if seen_NL is None:
            places_L = torch.arange(len(latents_LJ), device=q_NHD.device) + offset
            seen_NL = places_L <= torch.arange(len(q_NHD), device=q_NHD.device).unsqueeze(1)
        scores_HNL.masked_fill_(~seen_NL, float("-inf"))
        lse_HN = scores_HNL.logsumexp(-1)
        # A query that sees nothing of the part has a sum of 0, and weights of 0 after this.
        weights_HNL = (scores_HNL - lse_HN.clamp(min=torch.finfo(torch.float32).min).unsqueeze(-1)).exp()
        return (weights_HNL.to(v_HLV.dtype) @ v_HLV).float(), lse_HN


def merge(
    first_HNV: torch.Tensor, first_HN: torch.Tensor, second_HNV: torch.Tensor, second_HN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over two parts of a context from that over each, and its log-sum-exps. Queries must see
    something of the first part.
    """
    lse_HN = torch.logaddexp(first_HN, second_HN)
    one, other = ((part - lse_HN).exp().unsqueeze(-1) for part in (first_HN, second_HN))
    return first_HNV * one + second_HNV * other, lse_HN
