"""Attention of one layer by kernels in C.

Short queries (decode, verification of drafts) become rows: each new token with the range of tokens that it sees. Long
ones are left to ``torch_sdpa``'s code.

Legend: T tokens, R rows, N width of qkv, H query heads, K cache heads, D head size, V value size, P block size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from jackfield.interfaces import AttentionEnv, AttentionStep, HostLengths
from jackfield_attention.torch_sdpa_layer import ROW_LIMIT, Long, SdpaLayer, SdpaMetadata, SdpaMetadataBuilder
from jackfield_native.library import address, kernels

Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class NativeMetadata:
    """One step.

    Args:
        rows: [4, R] int32: token of the step, sequence, first token seen, and the end of what is seen; contiguous.
        table: [B, M] int32. long: queries that torch handles. branched: a step with drafts that branch, which torch
            handles whole, or None.
    """

    rows: torch.Tensor
    table: torch.Tensor
    long: list[Long]
    branched: SdpaMetadata | None = None


class NativeMetadataBuilder(SdpaMetadataBuilder):
    """Sorts a step into rows and long queries. Lengths are read where the step has them, which is the host."""

    host_lengths = HostLengths.NONE

    def __init__(self, env: AttentionEnv) -> None:
        super().__init__(env)
        # Torch's code cuts long queries as it sees fit, so that none is long where results must not depend on that.
        self._limit = np.iinfo(np.int32).max if "batch_invariant" in env.request.needs else ROW_LIMIT

    def build(self, step: AttentionStep) -> NativeMetadata:  # type: ignore[override]  # rows are of another kind
        """Return the metadata of ``step``."""
        if step.tree is not None:
            whole = super().build(replace(step, lengths_host=step.lengths.numpy()))
            return NativeMetadata(torch.empty((4, 0), dtype=torch.int32), step.block_table, [], whole)
        if step.max_query == 1:
            return NativeMetadata(self._decodes(step), step.block_table, [])
        starts, lengths = step.query_start_host, step.lengths.numpy()
        counts = np.diff(starts)
        short = np.flatnonzero(counts <= self._limit)
        sequence = np.repeat(short, counts[short])
        within = np.arange(len(sequence)) - np.repeat(np.cumsum(counts[short]) - counts[short], counts[short])
        rows = self._seen(starts[sequence] + within, sequence, lengths[sequence] - counts[sequence] + within + 1)
        long = [
            self._long(step, int(b), int(starts[b]), int(starts[b + 1]), int(lengths[b]))
            for b in np.flatnonzero(counts > self._limit)
        ]
        return NativeMetadata(torch.from_numpy(rows), step.block_table, long)

    def capture(self, num_sequences: int, max_query: int) -> NativeMetadata:
        """See MetadataBuilder.

        Raises:
            NotImplementedError: sequences have several new tokens.
        """
        if max_query != 1:
            raise NotImplementedError("native_cpu records steps of one token for each sequence")
        rows = torch.zeros((4, num_sequences), dtype=torch.int32)
        return NativeMetadata(rows, torch.zeros((num_sequences, 1), dtype=torch.int32), [])

    def _decodes(self, step: AttentionStep) -> torch.Tensor:
        """Return rows of one token for each sequence, by ops of torch alone: what a recorded step can do."""
        end, count = step.lengths.int(), step.num_sequences
        first = (end - self._window).clamp_(min=0) if self._window else torch.zeros_like(end)
        token = torch.arange(count, dtype=torch.int32)
        return torch.stack((token, token, first, end))

    def _seen(
        self, token: npt.NDArray[np.integer], sequence: npt.NDArray[np.integer], end: npt.NDArray[np.integer]
    ) -> Ints:
        first = np.maximum(end - self._window, 0) if self._window else np.zeros_like(end)
        return np.stack((token, sequence, first, end)).astype(np.int32, order="C")


class NativeLayer(SdpaLayer):
    """Implements :class:`jackfield.interfaces.PreparingLayer` over pages ``[pages, K, P, D]``."""

    def __init__(self, env: AttentionEnv) -> None:
        super().__init__(env)
        request = env.request
        self._heads, self._kv_heads, self._size = request.local_heads, request.local_kv_heads, request.head_size
        self._value_size = request.value_head_size or request.head_size
        self._kernels = kernels()
        self._cache: Mapping[str, torch.Tensor] | None = None
        self._planes: tuple[int, ...] = ()

    def write(
        self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: Mapping[str, torch.Tensor], slots: torch.Tensor
    ) -> None:
        """See AttentionLayer."""
        k_TKD, v_TKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (k_TKD, v_TKD))
        self._kernels.jf_write(
            k_TKD.data_ptr(),
            *k_TKD.stride()[:2],
            v_TKD.data_ptr(),
            *v_TKD.stride()[:2],
            *self._pages(cache),
            slots.data_ptr(),
            slots.shape[0],
            self._kv_heads,
            self._size,
            self._value_size,
            self._block,
            torch.get_num_threads(),
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
        """See PreparingLayer: norms, rotation and cache write in one call; keys are overwritten too.

        Args:
            qkv_TN: [T, (H + K) D + K V] float32, rows contiguous. cos_sin_TR: cosines then sines in float32, or None
                for no rotation. q_weight_D, k_weight_D, eps: of the norms; None for no norm. cache: planes. slots: [T]
                int64; a negative slot is not written.
        """
        stride, half = (0, 0) if cos_sin_TR is None else (cos_sin_TR.stride(0), cos_sin_TR.shape[-1] // 2)
        self._kernels.jf_prepare(
            qkv_TN.data_ptr(),
            qkv_TN.stride(0),
            address(cos_sin_TR),
            stride,
            half,
            address(q_weight_D),
            address(k_weight_D),
            eps,
            *self._pages(cache),
            slots.data_ptr(),
            qkv_TN.shape[0],
            self._heads,
            self._kv_heads,
            self._size,
            self._value_size,
            self._block,
            torch.get_num_threads(),
        )

    def attend(  # type: ignore[override]  # rows are of another kind
        self, q_THD: torch.Tensor, cache: Mapping[str, torch.Tensor], metadata: NativeMetadata, out_THD: torch.Tensor
    ) -> None:
        """See AttentionLayer."""
        if metadata.branched is not None:
            super().attend(q_THD, cache, metadata.branched, out_THD)
        if metadata.rows.shape[1]:
            self._attend_short(q_THD, cache, metadata, out_THD)
        for query in metadata.long:
            self._attend_long(q_THD[query.start : query.stop], cache, query, out_THD[query.start : query.stop])

    def _attend_short(
        self, q_THD: torch.Tensor, cache: Mapping[str, torch.Tensor], metadata: NativeMetadata, out_THD: torch.Tensor
    ) -> None:
        rows = metadata.rows.shape[1]
        first = metadata.rows.data_ptr()
        self._kernels.jf_attend(
            q_THD.data_ptr(),
            *q_THD.stride()[:2],
            *self._pages(cache),
            out_THD.data_ptr(),
            *out_THD.stride()[:2],
            *(first + 4 * rows * part for part in range(4)),
            metadata.table.data_ptr(),
            metadata.table.stride(0),
            rows,
            self._heads,
            self._kv_heads,
            self._size,
            self._value_size,
            self._block,
            self._scale,
            self._softcap,
            torch.get_num_threads(),
        )

    def _pages(self, cache: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
        """Return the address of each plane and its strides of pages, heads and places; found once for a cache."""
        if cache is not self._cache:
            self._planes = tuple(n for name in ("k", "v") for n in (cache[name].data_ptr(), *cache[name].stride()[:3]))
            self._cache = cache
        return self._planes
