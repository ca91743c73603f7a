"""Long queries through FlashInfer's paged prefill. Legend: T tokens, N of them in long queries, H query heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper

from jackfield.errors import ConfigError
from jackfield.interfaces import AttentionEnv, AttentionStep, HostLengths, StepLimits
from jackfield.interfaces.attention import PROMPT_TOKENS
from jackfield_attention.flashinfer import FA3_CAPABILITY, PLANS_IN_TURN, WORKSPACE_MB, kernels_for
from jackfield_attention.torch_sdpa_layer import ranges
from jackfield_attention.transfer import sent
from jackfield_attention.triton_layer import TritonLayer
from jackfield_attention.triton_metadata import TritonMetadata, TritonMetadataBuilder

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FlashInferMetadata:
    """One step: what goes to Triton, and the ``tokens`` of the planned queries (a slice, or places [N] int64)."""

    rest: TritonMetadata
    planned: Any = None
    tokens: slice | torch.Tensor | None = None


class FlashInferMetadataBuilder(TritonMetadataBuilder):
    """Plans prompts, whose lengths the host knows exactly, once for all layers of the group."""

    host_lengths = HostLengths.UPPER_BOUND

    def __init__(self, env: AttentionEnv) -> None:
        super().__init__(env)
        self._long = np.zeros(0, dtype=np.int64)
        self._wrappers: list[Any] = []
        self._turn = 0

    def allocate(self, limits: StepLimits) -> None:
        """See MetadataBuilder."""
        super().allocate(limits)
        env, values = self._env, self._env.settings.values
        workspace = torch.empty(
            int(values.get("workspace_mb", WORKSPACE_MB)) << 20, dtype=torch.uint8, device=env.device
        )
        layout = "HND" if env.spec.planes[0].shape[0] == env.request.local_kv_heads else "NHD"
        kernels = kernels_for(env.request, str(values.get("kernels", "")))
        device = env.request.device
        if kernels == "fa3" and device is not None and device.capability != FA3_CAPABILITY:
            raise ConfigError(
                "the kernels fa3 need capability 9.0",
                field="plugins.options.flashinfer.kernels",
                value=kernels,
                remedy="use fa2, or leave it out",
            )
        self._wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(workspace, layout, backend=kernels) for _ in range(PLANS_IN_TURN)
        ]

    def build(self, step: AttentionStep) -> FlashInferMetadata:  # type: ignore[override]  # of another kind
        """See MetadataBuilder."""
        counts = np.diff(step.query_start_host[: step.num_sequences + 1])
        self._long = np.flatnonzero(counts >= PROMPT_TOKENS)
        rest = super().build(step)
        if rest.tiles is None or not len(self._long):
            return FlashInferMetadata(rest)
        planned = self._plan_long(step, counts[self._long].astype(np.int64))
        return FlashInferMetadata(rest, planned, self._tokens_of(step))

    def capture(self, num_sequences: int, max_query: int) -> FlashInferMetadata:  # type: ignore[override]
        """See MetadataBuilder; long queries cannot be recorded."""
        return FlashInferMetadata(super().capture(num_sequences, max_query))

    def advance(self, tokens: int) -> FlashInferMetadata:  # type: ignore[override]
        """See MetadataBuilder."""
        return FlashInferMetadata(super().advance(tokens))

    def _tiles(self, step: AttentionStep) -> npt.NDArray[np.int32]:
        tiles = super()._tiles(step)
        return tiles[~np.isin(tiles[:, 0], self._long)]

    def _plan_long(self, step: AttentionStep, counts: Ints) -> Any:
        """Return a wrapper that has planned the long queries."""
        self._turn = (self._turn + 1) % PLANS_IN_TURN
        wrapper = self._wrappers[self._turn]
        request, block = self._env.request, self._env.block_size
        assert step.lengths_host is not None
        lengths = step.lengths_host[self._long].astype(np.int64)
        pages = -(-lengths // block)
        owners, places = np.repeat(self._long, pages), ranges(pages)
        indices = step.block_table[sent(owners, self._env.device), sent(places, self._env.device)].int()
        wrapper.plan(
            _starts(counts),
            _starts(pages),
            indices,
            torch.from_numpy(((lengths - 1) % block + 1).astype(np.int32)),
            request.local_heads,
            request.local_kv_heads,
            request.head_size,
            block,
            causal=True,
            sm_scale=request.scale,
            window_left=request.window - 1 if request.window else -1,
            logits_soft_cap=request.softcap or None,
            q_data_type=getattr(torch, request.dtype),
            kv_data_type=getattr(torch, request.dtype),
        )
        return wrapper

    def _tokens_of(self, step: AttentionStep) -> slice | torch.Tensor:
        """Return where the tokens of long queries are: one behind the other, unless a short query lies between."""
        starts = step.query_start_host.astype(np.int64)
        first, last = int(self._long[0]), int(self._long[-1])
        if last - first + 1 == len(self._long):
            return slice(int(starts[first]), int(starts[last + 1]))
        counts = np.diff(starts)[self._long]
        return sent(np.repeat(starts[self._long], counts) + ranges(counts), self._env.device)


class FlashInferLayer(TritonLayer):
    """Cache and decode of ``triton``, prompts by FlashInfer."""

    def attend(  # type: ignore[override]  # a layer and the builder of the same backend belong together
        self,
        q_THD: torch.Tensor,
        cache: Mapping[str, torch.Tensor],
        metadata: FlashInferMetadata,
        out_THD: torch.Tensor,
    ) -> None:
        """See AttentionLayer."""
        super().attend(q_THD, cache, metadata.rest, out_THD)
        tokens, planes = metadata.tokens, (cache["k"], cache["v"])
        if isinstance(tokens, slice):
            metadata.planned.run(q_THD[tokens], planes, out=out_THD[tokens])
        elif tokens is not None:
            out_THD.index_copy_(0, tokens, metadata.planned.run(q_THD.index_select(0, tokens), planes))


def _starts(counts: Ints) -> torch.Tensor:
    """Return the place where each begins, and the end, int32 on the host."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
