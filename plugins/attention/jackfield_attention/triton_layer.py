"""The Triton attention of one layer. Legend: T tokens, N width of qkv, H query heads, K cache heads, D head size, R
rotary size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from jackfield.interfaces import AttentionEnv
from jackfield_attention.triton_cache_kernels import qk_norm_rope_write_kernel, write_kernel
from jackfield_attention.triton_decode_kernels import decode_kernel
from jackfield_attention.triton_metadata import TritonMetadata
from jackfield_attention.triton_prefill_kernels import prefill_kernel
from jackfield_attention.triton_tuning import decode_shape, group_of, prefill_shape
from jackfield_triton.launch import launch_options, pdl_of, power_of_two

HEADS = 8
"""Heads that a program moves."""
LOG2_E = math.log2(math.e)


class TritonLayer:
    """Implements :class:`jackfield.interfaces.PreparingLayer`."""

    def __init__(self, env: AttentionEnv) -> None:
        request = env.request
        self.heads, self.kv_heads, self.size = request.local_heads, request.local_kv_heads, request.head_size
        self.block = env.block_size
        self.group = group_of(env)
        # Kernels are told of windows one behind the other by a negative number.
        self.window = (request.window or 0) * {"sliding": 1, "chunked_local": -1}.get(request.kind, 0)
        self.softcap = request.softcap
        self.scale = request.scale
        self.sinks = env.sinks
        self.scales = env.k_scale, env.v_scale
        self.scaled = env.k_scale is not None
        self.pdl = pdl_of(_capability(env), env.settings.values.get("pdl", True))
        self._head_first = env.spec.planes[0].shape[0] == self.kv_heads
        self._decode, self._prefill = decode_shape(env), prefill_shape(env)

    def strides(self, plane: torch.Tensor) -> tuple[int, int, int]:
        """Return the (page, head, token) strides of a plane."""
        page, first, second, _ = plane.stride()
        return (page, first, second) if self._head_first else (page, second, first)

    def write(
        self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: Mapping[str, torch.Tensor], slots: torch.Tensor
    ) -> None:
        """See AttentionLayer."""
        tokens = len(slots)
        if not tokens:
            return
        write_kernel[(tokens, -(-self.kv_heads // HEADS))](
            k_TKD,
            v_TKD,
            cache["k"],
            cache["v"],
            slots,
            *self._scale_pointers(slots),
            self.kv_heads,
            *k_TKD.stride()[:2],
            *v_TKD.stride()[:2],
            *self.strides(cache["k"]),
            *self.strides(cache["v"]),
            D=self.size,
            WIDTH=power_of_two(self.size),
            PAGE=self.block,
            HEADS=HEADS,
            SCALED=self.scaled,
            num_warps=4,
        )

    def prepare(
        self,
        qkv_TN: torch.Tensor,
        cos_sin_TR: torch.Tensor | None,
        q_weight_D: torch.Tensor | None,
        k_weight_D: torch.Tensor | None,
        eps: float,
        cache: Mapping[str, torch.Tensor],
        slots: torch.Tensor,
    ) -> None:
        """See PreparingLayer: norms, rotation and cache write in one launch.

        Args:
            qkv_TN: [T, (H + 2 K) D], rows contiguous; its queries are overwritten, its keys and values are left as
                they are.
            cos_sin_TR: cosines then sines in float32, or None for no rotation.
            q_weight_D, k_weight_D, eps: of the norms; None for no norm.
            cache: planes. slots: [T]; a negative slot is not written.
        """
        tokens, size = len(qkv_TN), self.size
        half = size // 2 if cos_sin_TR is None else cos_sin_TR.shape[-1] // 2
        parts = -(-self.heads // HEADS) + 2 * -(-self.kv_heads // HEADS)
        if tokens:
            qk_norm_rope_write_kernel[(tokens, parts)](
                qkv_TN,
                qkv_TN if q_weight_D is None else q_weight_D,
                qkv_TN if k_weight_D is None else k_weight_D,
                eps,
                qkv_TN if cos_sin_TR is None else cos_sin_TR,
                cache["k"],
                cache["v"],
                slots,
                *self._scale_pointers(slots),
                qkv_TN.stride(0),
                0 if cos_sin_TR is None else cos_sin_TR.stride(0),
                *self.strides(cache["k"]),
                *self.strides(cache["v"]),
                Q_HEADS=self.heads,
                K_HEADS=self.kv_heads,
                D=size,
                WIDTH=power_of_two(size),
                HALF=half,
                HALF_WIDTH=power_of_two(half),
                REST_WIDTH=power_of_two(max(1, size - 2 * half)),
                PAGE=self.block,
                HEADS=HEADS,
                NORM=q_weight_D is not None,
                ROPE=cos_sin_TR is not None,
                SCALED=self.scaled,
                num_warps=2,
                **launch_options(self.pdl),
            )

    def attend(
        self, q_THD: torch.Tensor, cache: Mapping[str, torch.Tensor], metadata: TritonMetadata, out_THD: torch.Tensor
    ) -> None:
        """See AttentionLayer."""
        if metadata.num_short:
            self.decode(q_THD, cache, metadata, out_THD)
        if metadata.tiles is not None and len(metadata.tiles):
            self.prefill(q_THD, cache, metadata, metadata.tiles, out_THD)

    def decode(
        self, q_THD: torch.Tensor, cache: Mapping[str, torch.Tensor], metadata: TritonMetadata, out_THD: torch.Tensor
    ) -> None:
        """Attend from the short queries of the step."""
        plan, scratch, shape = metadata.plan, metadata.scratch, self._decode
        decode_kernel[(metadata.num_short, self.kv_heads, plan.splits)](
            q_THD,
            cache["k"],
            cache["v"],
            out_THD,
            metadata.lengths,
            metadata.query_start,
            metadata.block_table,
            self.sinks if self.sinks is not None else scratch.bests,
            scratch.parts,
            scratch.bests,
            scratch.totals,
            scratch.counters,
            *self._scale_pointers(scratch.bests),
            *_branch_pointers(metadata),
            plan.splits,
            *self._factors(),
            *self._strides(q_THD, cache, out_THD),
            metadata.block_table.stride(0),
            GROUP=self.group,
            QUERY=plan.query,
            ROWS=plan.rows,
            D=self.size,
            WIDTH=power_of_two(self.size),
            PAGE=self.block,
            TILE=shape.tile,
            WINDOW=self.window,
            CAPPED=self.softcap > 0,
            SINKS=self.sinks is not None,
            MERGE=power_of_two(plan.splits),
            SCALED=self.scaled,
            TREE=metadata.branches is not None,
            num_warps=shape.warps,
            num_stages=shape.stages,
            **launch_options(self.pdl),
        )

    def prefill(
        self,
        q_THD: torch.Tensor,
        cache: Mapping[str, torch.Tensor],
        metadata: TritonMetadata,
        tiles: torch.Tensor,
        out_THD: torch.Tensor,
    ) -> None:
        """Attend from the long queries of the step."""
        shape = self._prefill
        prefill_kernel[(self.kv_heads, len(tiles))](
            q_THD,
            cache["k"],
            cache["v"],
            out_THD,
            metadata.lengths,
            metadata.query_start,
            metadata.block_table,
            tiles,
            self.sinks if self.sinks is not None else metadata.scratch.bests,
            *self._scale_pointers(metadata.scratch.bests),
            *_branch_pointers(metadata),
            *self._factors(),
            *self._strides(q_THD, cache, out_THD),
            metadata.block_table.stride(0),
            GROUP=self.group,
            ROWS=shape.rows,
            D=self.size,
            WIDTH=power_of_two(self.size),
            PAGE=self.block,
            TILE=shape.tile,
            WINDOW=self.window,
            CAPPED=self.softcap > 0,
            SINKS=self.sinks is not None,
            SCALED=self.scaled,
            TREE=metadata.branches is not None,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )

    def _scale_pointers(self, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales of keys and values; kernels that are told of none get ``other`` and do not read it."""
        k_scale, v_scale = self.scales
        return (other if k_scale is None else k_scale), (other if v_scale is None else v_scale)

    def _factors(self) -> tuple[float, float]:
        """Return the factor on products and the cap, such that scores come out in units of log 2."""
        if self.softcap > 0:
            return self.scale / self.softcap, self.softcap * LOG2_E
        return self.scale * LOG2_E, 0.0

    def _strides(
        self, q_THD: torch.Tensor, cache: Mapping[str, torch.Tensor], out_THD: torch.Tensor
    ) -> tuple[int, ...]:
        return (
            *q_THD.stride()[:2],
            *self.strides(cache["k"]),
            *self.strides(cache["v"]),
            *out_THD.stride()[:2],
        )


def _branch_pointers(metadata: TritonMetadata) -> tuple[torch.Tensor, ...]:
    """Return base, bits and positions of tokens; without branches something that is not read."""
    branches = metadata.branches
    return (metadata.lengths,) * 3 if branches is None else (branches.base, branches.bits, branches.text)


def _capability(env: AttentionEnv) -> tuple[int, int]:
    """Return the capability of the device that kernels run on, (0, 0) where they run on none."""
    facts = env.request.device
    return (0, 0) if facts is None or env.device.type != "cuda" else facts.capability
