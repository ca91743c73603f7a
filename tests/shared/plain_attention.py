"""Attention for tests: plain torch over whole block tables, masked by positions. It needs no lengths on the host.

Legend: T tokens, M blocks of a sequence, P block size, L = M * P, H query heads, K cache heads, G = H / K, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from jackfield.interfaces import (
    BLOCK,
    AttentionBackend,
    AttentionEnv,
    AttentionRequest,
    AttentionStep,
    CacheSpec,
    GraphSupport,
    HostLengths,
    Plane,
    StepLimits,
)
from jackfield.layers.functional import rotary

Cache = Mapping[str, torch.Tensor]


class PlainBuilder:
    """Hands the step on, and checks that it keeps what it was promised."""

    def __init__(self, host_lengths: HostLengths) -> None:
        self.host_lengths = host_lengths
        self.limits = StepLimits(0, 0, 0, 0)
        self.built = 0

    def allocate(self, limits: StepLimits) -> None:
        self.limits = limits

    def build(self, step: AttentionStep) -> AttentionStep:
        limits = self.limits
        assert step.num_tokens <= limits.max_tokens, "more tokens than were announced"
        assert step.num_sequences <= limits.max_sequences, "more sequences than were announced"
        assert step.max_length <= limits.max_length and step.block_table.shape[1] <= limits.max_blocks
        assert step.lengths_host is not None, "lengths were asked for"
        assert len(step.lengths_host) == step.num_sequences and int(np.max(step.lengths_host)) <= step.max_length
        self.built += 1
        return step

    def capture(self, num_sequences: int, max_query: int) -> Any:
        raise NotImplementedError

    def advance(self, tokens: int) -> Any:
        raise NotImplementedError


class PlainLayer:
    """One layer over pages ``[pages, P, K, D]``."""

    def __init__(self, env: AttentionEnv) -> None:
        self._scale = env.request.scale
        self._heads, self._kv_heads, self._size = env.request.num_heads, env.request.num_kv_heads, env.request.head_size

    def write(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: Cache, slots: torch.Tensor) -> None:
        for name, new in (("k", k_TKD), ("v", v_TKD)):
            flat, place = cache[name].flatten(0, 1), slots.clamp_min(0)
            flat[place] = torch.where((slots < 0)[:, None, None], flat[place], new)

    def attend(self, q_THD: torch.Tensor, cache: Cache, metadata: AttentionStep, out_THD: torch.Tensor) -> None:
        tokens = torch.arange(len(q_THD), dtype=torch.int32, device=q_THD.device)
        sequence_T = torch.searchsorted(metadata.query_start[1:], tokens, right=True)
        pages_TM = metadata.block_table[sequence_T]
        k_TLKD, v_TLKD = (cache[name][pages_TM].flatten(1, 2) for name in ("k", "v"))
        seen_TL = torch.arange(k_TLKD.shape[1], device=q_THD.device) <= metadata.positions[:, None]
        q_TKGD = q_THD.view(len(q_THD), k_TLKD.shape[2], -1, q_THD.shape[2])
        scores_TKGL = torch.einsum("tkgd,tlkd->tkgl", q_TKGD, k_TLKD) * self._scale
        weights_TKGL = scores_TKGL.masked_fill(~seen_TL[:, None, None], float("-inf")).softmax(-1)
        v_TLKD = torch.where(seen_TL[:, :, None, None], v_TLKD, 0.0)
        out_THD.copy_(torch.einsum("tkgl,tlkd->tkgd", weights_TKGL, v_TLKD).flatten(1, 2))

    def prepare(
        self,
        qkv_TN: torch.Tensor,
        cos_sin_TR: torch.Tensor | None,
        q_weight_D: torch.Tensor | None,
        k_weight_D: torch.Tensor | None,
        eps: float,
        cache: Cache,
        slots: torch.Tensor,
    ) -> None:
        q_THD, k_TKD, v_TKD = (
            part.view(len(part), -1, self._size)
            for part in torch.split(qkv_TN, [n * self._size for n in (self._heads, self._kv_heads, self._kv_heads)], 1)
        )
        for part, weight in ((q_THD, q_weight_D), (k_TKD, k_weight_D)):
            if weight is not None:
                part.copy_(F.rms_norm(part, (self._size,), weight, eps))
            if cos_sin_TR is not None:
                rotary(part, cos_sin_TR)
        self.write(k_TKD, v_TKD, cache, slots)


class Plain(AttentionBackend):
    """Can be recorded."""

    name = "plain"
    summary = "whole block tables"
    kinds: ClassVar[frozenset[str]] = frozenset({"full"})
    features: ClassVar[frozenset[str]] = frozenset({"prefill", "chunked_prefill", "decode", "mixed", "gqa"})
    graph_support: ClassVar[GraphSupport] = GraphSupport.UNIFORM
    host_lengths: ClassVar[HostLengths] = HostLengths.UPPER_BOUND

    @classmethod
    def cache_specs(cls, request: AttentionRequest) -> Sequence[CacheSpec]:
        shape = (BLOCK, request.local_kv_heads, request.head_size)
        return [CacheSpec((Plane("k", request.dtype, shape), Plane("v", request.dtype, shape)))]

    @classmethod
    def metadata_builder(cls, env: AttentionEnv) -> PlainBuilder:
        return PlainBuilder(cls.host_lengths)

    @classmethod
    def layer(cls, env: AttentionEnv, index: int) -> PlainLayer:
        return PlainLayer(env)


class Preparing(Plain):
    """Does all that comes before attention itself."""

    name = "preparing"
    prepares: ClassVar[bool] = True


class Exact(Plain):
    """Wants exact lengths, so that nothing can be recorded."""

    name = "exact"
    host_lengths: ClassVar[HostLengths] = HostLengths.EXACT


class Unable(Plain):
    """Says that it cannot be part of a graph."""

    name = "unable"
    graph_support: ClassVar[GraphSupport] = GraphSupport.NONE
