"""Latent attention of one layer by Triton kernels. Legend as in ``torch_mla_layer``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from jackfield.interfaces import AttentionEnv
from jackfield_attention.torch_mla_layer import Cache, MlaLayer
from jackfield_attention.triton_mla_kernels import mla_decode_kernel, mla_merge_kernel, mla_write_kernel
from jackfield_attention.triton_mla_metadata import (
    ContextPart,
    Contexts,
    MlaMetadata,
    Parts,
    decode_shape,
    prefill_shape,
)
from jackfield_attention.triton_mla_prefill_kernels import mla_prefill_kernel
from jackfield_triton.launch import launch_options, pdl_of, power_of_two

LOG2_E = math.log2(math.e)
MERGED = 128
"""Least features of a latent that one program puts together."""
MERGED_AT_ONCE = 4096
"""Numbers that it reads, where splits are few."""


class TritonMlaLayer(MlaLayer):
    """Implements :class:`jackfield.interfaces.LatentLayer`."""

    def __init__(self, env: AttentionEnv) -> None:
        super().__init__(env)
        self._rope = int(env.request.extra["rope_size"])
        self._shape, self._prefill = decode_shape(env), prefill_shape(env)
        facts = env.request.device
        capability = (0, 0) if facts is None or env.device.type != "cuda" else facts.capability
        self.pdl = pdl_of(capability, env.settings.values.get("pdl", True))
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
                **launch_options(self.pdl),
            )

    def attend(  # type: ignore[override]  # metadata is of another kind
        self, q_THD: torch.Tensor, cache: Mapping[str, torch.Tensor], metadata: MlaMetadata, out_THV: torch.Tensor
    ) -> None:
        """See LatentLayer: single tokens absorbed, longer queries expanded."""
        count = metadata.num_decodes
        if count:
            q_NHK, q_NHP = torch.split(q_THD[:count], [self._plain, self._rope], -1)
            q_HNR = torch.bmm(q_NHK.transpose(0, 1), self._k_HKR)
            mixed_NHR = self.decode(q_HNR.transpose(0, 1), q_NHP, cache["latent"], metadata)
            out_HNV = out_THV[:count].transpose(0, 1)
            torch.bmm(mixed_NHR.transpose(0, 1), self._v_HVR.transpose(1, 2), out=out_HNV)
        if metadata.contexts is not None:
            self.prefill(q_THD, cache, metadata, metadata.contexts, out_THV)

    def prefill(
        self, q_THD: torch.Tensor, cache: Cache, metadata: MlaMetadata, contexts: Contexts, out_THV: torch.Tensor
    ) -> None:
        """Write what longer queries mix; the keys and values of one part after another are expanded."""
        (tokens, heads), value = out_THV.shape[:2], self._v_HVR.shape[1]
        mixes = sums = metadata.parts.totals
        if contexts.several:
            mixes = out_THV.new_empty((tokens, heads, value), dtype=torch.float32)
            sums = mixes.new_empty((tokens, heads))
        sizes = {"K": self._plain, "K_WIDTH": max(16, power_of_two(self._plain))}
        sizes |= {"V": value, "V_WIDTH": max(16, power_of_two(value))}
        for part in contexts.parts:
            latent_LR, rope_LP = self._latents_of(cache, part, q_THD.dtype)
            kv_LHJ = torch.unflatten(F.linear(latent_LR, self._kv_HJR.flatten(0, 1)), 1, (heads, -1))
            k_LHK, v_LHV = torch.split(kv_LHJ, [self._plain, value], -1)
            mla_prefill_kernel[(heads, len(part.tiles))](
                q_THD,
                k_LHK,
                v_LHV,
                rope_LP,
                out_THV,
                mixes,
                sums,
                part.tiles,
                metadata.lengths,
                contexts.query_start,
                self._scale * LOG2_E,
                *q_THD.stride()[:2],
                *k_LHK.stride()[:2],
                *v_LHV.stride()[:2],
                rope_LP.stride(0),
                *out_THV.stride()[:2],
                HEADS=heads,
                ROWS=self._prefill.rows,
                TILE=self._prefill.tile,
                num_warps=self._prefill.warps,
                num_stages=self._prefill.stages,
                P=self._sizes["P"],
                P_WIDTH=self._sizes["P_WIDTH"],
                **sizes,
            )

    def _latents_of(self, cache: Cache, part: ContextPart, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the latents [L, R] and rotated keys [L, P] of a part. What lies behind a sequence may be anything: the
        kernel knows where it ends.
        """
        rows_LJ = cache["latent"][part.pages, part.offsets].to(dtype)
        latent_LR, rope_LP = torch.split(rows_LJ, [self._rank, rows_LJ.shape[1] - self._rank], 1)
        return latent_LR, rope_LP

    def decode(
        self, q_NHR: torch.Tensor, q_NHP: torch.Tensor, latent_GBJ: torch.Tensor, metadata: MlaMetadata
    ) -> torch.Tensor:
        """Return [N, H, R], what single tokens mix of latents; both parts of queries are contiguous inside a head."""
        (count, heads), splits, parts = q_NHR.shape[:2], metadata.splits, metadata.parts
        out_NHR, shape = q_NHR.new_empty((count, heads, self._rank)), self._shape
        tensors = (q_NHR, q_NHP, latent_GBJ, out_NHR, metadata.lengths, metadata.block_table)
        arguments = (
            *tensors,
            parts.mixed,
            parts.bests,
            parts.totals,
            splits,
            self._scale * LOG2_E,
            *q_NHR.stride()[:2],
            *q_NHP.stride()[:2],
            *latent_GBJ.stride()[:2],
            metadata.block_table.stride(0),
            *out_NHR.stride()[:2],
        )
        options: dict[str, Any] = {"HEADS": heads, "ROWS": shape.heads, "PAGE": self._block, "TILE": shape.tile}
        options |= {"WHOLE": splits == 1, "num_warps": shape.warps, **launch_options(self.pdl)}
        blocks = -(-heads // shape.heads)
        if shape.tiled:
            kernel = _tiles_kernel()
            kernel[(blocks, count, splits)](*arguments, R=self._rank, P=self._rope, **options)
        else:
            options |= {"num_stages": shape.stages, **self._sizes}
            mla_decode_kernel[(count, blocks, splits)](*arguments, **options)
        if splits > 1:
            self.put_together(parts, splits, out_NHR)
        return out_NHR

    def put_together(self, parts: Parts, splits: int, out_NHR: torch.Tensor) -> None:
        """Write what the splits left, put together."""
        count, heads = out_NHR.shape[:2]
        columns = min(self._sizes["R_WIDTH"], max(MERGED, MERGED_AT_ONCE // power_of_two(splits)))
        mla_merge_kernel[(count, heads, -(-self._rank // columns))](
            parts.mixed,
            parts.bests,
            parts.totals,
            out_NHR,
            splits,
            *out_NHR.stride()[:2],
            HEADS=heads,
            R=self._rank,
            COLUMNS=columns,
            SPLITS=power_of_two(splits),
            num_warps=4,
            **launch_options(self.pdl),
        )


def _tiles_kernel() -> Any:
    """Return the kernel of :class:`DecodeShape` ``tiled``; Gluon is imported where it is used alone."""
    from jackfield_attention.gluon_mla_kernels import mla_tiles_kernel

    return mla_tiles_kernel
