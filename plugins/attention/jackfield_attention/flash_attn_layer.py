"""Long queries through ``torch.nn.attention.varlen``, whose causal mask is aligned to the last key: a chunk sees the
tokens kept before it. Legend: T tokens, L kept tokens of all long sequences, H query heads, K cache heads, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn

from jackfield.interfaces import AttentionEnv, AttentionStep, HostLengths, StepLimits
from jackfield_attention.triton_cache_kernels import gather_kernel
from jackfield_attention.triton_layer import TritonLayer
from jackfield_attention.triton_metadata import TritonMetadata, TritonMetadataBuilder
from jackfield_triton.launch import power_of_two

GATHER_TILE = 32


@dataclass(frozen=True, slots=True)
class LongQueries:
    """The long queries of a step.

    Args:
        first: index of the first such sequence. start: its first token. kept: bound of L.
        query_start, key_start: [B + 1] int32 in the tokens from ``start``, and in the gathered keys.
        max_query, max_length: bounds on the host.
    """

    first: int
    start: int
    kept: int
    query_start: torch.Tensor
    key_start: torch.Tensor
    max_query: int
    max_length: int


@dataclass(frozen=True, slots=True)
class FlashMetadata:
    """One step: short queries for the decode kernel, and long ones or None."""

    short: TritonMetadata
    long: LongQueries | None


class FlashMetadataBuilder:
    """Adds the long queries to what the Triton builder makes of the short ones."""

    host_lengths = HostLengths.UPPER_BOUND

    def __init__(self, env: AttentionEnv) -> None:
        self._short = TritonMetadataBuilder(env)

    def allocate(self, limits: StepLimits) -> None:
        """See MetadataBuilder."""
        self._short.allocate(limits)

    def build(self, step: AttentionStep) -> FlashMetadata:
        """See MetadataBuilder."""
        short = self._short.build(step)
        if short.tiles is None:
            return FlashMetadata(short, None)
        return FlashMetadata(replace(short, tiles=None), _long_queries(step))

    def capture(self, num_sequences: int, max_query: int) -> FlashMetadata:
        """See MetadataBuilder; long queries cannot be recorded."""
        return FlashMetadata(self._short.capture(num_sequences, max_query), None)

    def advance(self, tokens: int) -> FlashMetadata:
        """See MetadataBuilder."""
        return FlashMetadata(self._short.advance(tokens), None)


class FlashLayer(TritonLayer):
    """Cache and decode of ``triton``, prefill of torch."""

    def __init__(self, env: AttentionEnv) -> None:
        super().__init__(env)
        self._options: dict[str, Any] = {
            "scale": self.scale,
            "window_size": (self.window - 1, 0) if self.window else (-1, 0),
            **_grouped(self.group),
        }

    def attend(  # type: ignore[override]  # a layer and the builder of the same backend belong together
        self, q_THD: torch.Tensor, cache: Mapping[str, torch.Tensor], metadata: FlashMetadata, out_THD: torch.Tensor
    ) -> None:
        """See AttentionLayer."""
        if metadata.short.num_short:
            self.decode(q_THD, cache, metadata.short, out_THD)
        long = metadata.long
        if long is not None:
            k_LKD, v_LKD = self.gather(cache, metadata.short, long)
            out_THD[long.start :] = self._flash(q_THD[long.start :], k_LKD, v_LKD, long)

    def gather(
        self, cache: Mapping[str, torch.Tensor], metadata: TritonMetadata, long: LongQueries
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [L, K, D] of the long queries' sequences, one after another."""
        table, lengths = metadata.block_table[long.first :], metadata.lengths[long.first :]
        shape = (long.kept, self.kv_heads, self.size)
        k_LKD, v_LKD = (torch.empty(shape, dtype=cache[name].dtype, device=table.device) for name in ("k", "v"))
        gather_kernel[(-(-long.max_length // GATHER_TILE), len(lengths), self.kv_heads)](
            cache["k"],
            cache["v"],
            k_LKD,
            v_LKD,
            lengths,
            long.key_start,
            table,
            *self.strides(cache["k"]),
            *self.strides(cache["v"]),
            table.stride(0),
            D=self.size,
            WIDTH=power_of_two(self.size),
            PAGE=self.block,
            TILE=GATHER_TILE,
            num_warps=4,
        )
        return k_LKD, v_LKD

    def _flash(self, q_THD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, long: LongQueries) -> torch.Tensor:
        mixed = varlen_attn(
            q_THD,
            k_LKD,
            v_LKD,
            long.query_start,
            long.key_start,
            long.max_query,
            long.max_length,
            **self._options,
        )
        assert isinstance(mixed, torch.Tensor)
        return mixed


def _long_queries(step: AttentionStep) -> LongQueries:
    assert step.lengths_host is not None
    first = step.num_decodes
    start = int(step.query_start_host[first])
    lengths = step.lengths[first : step.num_sequences]
    key_start = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=key_start[1:])
    bounds = step.lengths_host[first : step.num_sequences].astype(np.int64)
    query_start = step.query_start[first : step.num_sequences + 1] - start
    return LongQueries(first, start, int(bounds.sum()), query_start, key_start, step.max_query, int(bounds.max()))


def _grouped(group: int) -> dict[str, bool]:
    """Return the argument that allows fewer cache heads, where this torch asks for it."""
    if group > 1 and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return {"enable_gqa": True}
    return {}
