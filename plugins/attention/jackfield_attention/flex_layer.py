"""Attention of one layer by torch's flex_attention. Legend: T tokens, H query heads, K cache heads, D head size, V
value size, C pages, P block size, S = C * P keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from jackfield.interfaces import AttentionEnv
from jackfield_attention.flex_metadata import FlexMetadata
from jackfield_attention.torch_sdpa_layer import SdpaLayer
from jackfield_attention.torch_store import make_store

Scores = Callable[..., torch.Tensor]
SHAPES = 1 << 16
"""How often torch may look anew at how it computes a call. Left at its own bound it would refuse to after some shapes.
"""


class Flex:
    """Calls flex_attention for one layer, with what is done to its scores."""

    def __init__(self, env: AttentionEnv) -> None:
        self._scale, cap = env.request.scale, env.request.softcap
        # Not a number of Python's, which torch's compiler cannot have inside of scores once shapes differ.
        self._softcap = torch.tensor(cap, dtype=torch.float32, device=env.device) if cap else None
        self._slopes_H, self._sinks_H = env.alibi_slopes, env.sinks
        compiled = env.device.type != "cpu"
        self._settings: Any = torch.compiler.config  # which is a module to type checkers
        # What differs from call to call becomes a variable by itself. Were all numbers variables from the start, so
        # would be the sizes of a mask's blocks, for which torch has no kernel.
        self._call: Any = torch.compile(flex_attention) if compiled else flex_attention

    def __call__(
        self, q_THD: torch.Tensor, k_KSD: torch.Tensor, v_KSV: torch.Tensor, metadata: FlexMetadata
    ) -> torch.Tensor:
        """Return [H, T, V]."""
        with self._settings.patch(recompile_limit=SHAPES, accumulated_recompile_limit=SHAPES):
            mixed_1HTV, about = self._call(
                q_THD.transpose(0, 1).unsqueeze(0),
                k_KSD.unsqueeze(0),
                v_KSV.unsqueeze(0),
                score_mod=self._scores(metadata),
                block_mask=metadata.mask,
                scale=self._scale,
                enable_gqa=True,
                return_aux=AuxRequest(lse=self._sinks_H is not None),
            )
        mixed_HTV: torch.Tensor = mixed_1HTV[0]
        if self._sinks_H is None:
            return mixed_HTV
        # A sink takes part in the softmax: exp(lse) / (exp(lse) + exp(sink)) is left for the others.
        left_HT = torch.sigmoid(about.lse[0] - self._sinks_H.unsqueeze(1))
        return mixed_HTV * left_HT.unsqueeze(-1).to(mixed_HTV.dtype)

    def _scores(self, metadata: FlexMetadata) -> Scores | None:
        if self._softcap is not None:
            return soft_cap(self._softcap)
        if self._slopes_H is not None:
            return linear_bias(self._slopes_H, metadata.q_T, metadata.k_S)
        return None


def soft_cap(cap: torch.Tensor) -> Scores:
    """Return what brings scores between minus ``cap`` and ``cap``, which is one number."""

    def capped(score: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
        return torch.tanh(score / cap) * cap

    return capped


def linear_bias(slopes_H: torch.Tensor, q_T: torch.Tensor, k_S: torch.Tensor) -> Scores:
    """Return what adds a head's slope times the distance, negated (ALiBi, arXiv:2108.12409)."""

    def biased(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, token: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return score + slopes_H[head] * (k_S[key] - q_T[token])

    return biased


class FlexLayer:
    """Implements :class:`jackfield.interfaces.AttentionLayer` over the pages of ``torch_sdpa``."""

    def __init__(self, env: AttentionEnv) -> None:
        dtype = getattr(torch, env.request.dtype)
        scales = {"k": env.k_scale, "v": env.v_scale}
        self._store = make_store(env.request.cache_dtype or env.request.dtype, dtype, scales)
        self._flex, self._pages = Flex(env), SdpaLayer(env)

    def write(
        self, k_TKD: torch.Tensor, v_TKV: torch.Tensor, cache: Mapping[str, torch.Tensor], slots: torch.Tensor
    ) -> None:
        """See AttentionLayer."""
        self._pages.write(k_TKD, v_TKV, cache, slots)

    def attend(
        self, q_THD: torch.Tensor, cache: Mapping[str, torch.Tensor], metadata: FlexMetadata, out_THV: torch.Tensor
    ) -> None:
        """See AttentionLayer."""
        pages = metadata.pages
        assert pages is not None
        k_CKPD, v_CKPV = (self._store.read(cache, name, pages) for name in ("k", "v"))
        # What nobody wrote may be NaN, which no weight of zero takes away.
        v_CKPV[metadata.hidden_pages, :, metadata.hidden_places] = 0
        k_KSD, v_KSV = (part.transpose(0, 1).flatten(1, 2) for part in (k_CKPD, v_CKPV))
        out_THV.copy_(self._flex(q_THD, k_KSD, v_KSV, metadata).transpose(0, 1))


class FlexEncoderLayer:
    """Implements :class:`jackfield.interfaces.EncoderLayer`."""

    def __init__(self, env: AttentionEnv) -> None:
        self._flex = Flex(env)

    def attend_fresh(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor, metadata: FlexMetadata, out: torch.Tensor
    ) -> None:
        """See EncoderLayer."""
        mixed_HTV = self._flex(q_THD, k_TKD.transpose(0, 1), v_TKV.transpose(0, 1), metadata)
        out.copy_(mixed_HTV.transpose(0, 1))
