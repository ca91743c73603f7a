"""Single tokens over latents through FlashInfer. Legend as in ``torch_mla_layer``; N sequences with one new token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper

from jackfield.errors import ConfigError
from jackfield.interfaces import AttentionEnv, AttentionStep, HostLengths, StepLimits
from jackfield_attention.flashinfer import FA3_CAPABILITY, PLANS_IN_TURN, kernels_for
from jackfield_attention.flashinfer_mla import SIZES, WORKSPACE_MB
from jackfield_attention.torch_sdpa_layer import ranges
from jackfield_attention.transfer import sent
from jackfield_attention.triton_mla_layer import TritonMlaLayer
from jackfield_attention.triton_mla_metadata import MlaMetadata, Parts, TritonMlaMetadataBuilder

MOST_PIECES = 16384
"""Pieces of work that a plan has room for; more are written over what comes behind."""
PIECE_HEADS = 128


@dataclass(frozen=True, slots=True)
class FlashInferMlaMetadata(MlaMetadata):
    """One step, and the plan of its single tokens; None where there are none."""

    planned: Any = None


class FlashInferMlaMetadataBuilder(TritonMlaMetadataBuilder):
    """Plans single tokens, whose lengths the host knows exactly, once for all layers of the group."""

    host_lengths = HostLengths.EXACT

    def __init__(self, env: AttentionEnv) -> None:
        super().__init__(env)
        self._wrappers: list[Any] = []
        self._turn = 0

    def allocate(self, limits: StepLimits) -> None:
        """See MetadataBuilder.

        Raises:
            ConfigError: the device does not run the kernels that were named, or steps may have more sequences than a
                plan has room for.
        """
        env, self._limits = self._env, limits
        kernels = self._kernels()
        self._check_room(limits.max_sequences)
        # Nothing is split here; longer queries want an address that they do not use.
        none = torch.empty(1, dtype=torch.float32, device=env.device)
        self._parts = Parts(none, none, none)
        size = int(env.settings.values.get("workspace_mb", WORKSPACE_MB)) << 20
        workspace = torch.empty(size, dtype=torch.uint8, device=env.device)
        self._wrappers = [BatchMLAPagedAttentionWrapper(workspace, backend=kernels) for _ in range(PLANS_IN_TURN)]

    def build(self, step: AttentionStep) -> FlashInferMlaMetadata:
        """See MetadataBuilder."""
        rest = super().build(step)
        planned = self._plan(step) if rest.num_decodes else None
        return FlashInferMlaMetadata(
            num_decodes=rest.num_decodes,
            splits=rest.splits,
            lengths=rest.lengths,
            block_table=rest.block_table,
            long=rest.long,
            parts=rest.parts,
            contexts=rest.contexts,
            planned=planned,
        )

    def capture(self, num_sequences: int, max_query: int) -> MlaMetadata:
        """A plan is made on the host, so no step is recorded."""
        raise NotImplementedError("flashinfer_mla cannot be part of a graph")

    def _plan(self, step: AttentionStep) -> Any:
        """Return a wrapper that has planned the step's single tokens."""
        assert step.lengths_host is not None
        request, block, count = self._env.request, self._env.block_size, step.num_decodes
        self._turn = (self._turn + 1) % PLANS_IN_TURN
        wrapper = self._wrappers[self._turn]
        lengths = step.lengths_host[:count].astype(np.int32)
        pages = -(-lengths.astype(np.int64) // block)
        owners, places = (sent(part, self._env.device) for part in (np.repeat(np.arange(count), pages), ranges(pages)))
        dtype = getattr(torch, request.dtype)
        wrapper.plan(
            torch.arange(count + 1, dtype=torch.int32),
            torch.from_numpy(np.concatenate(([0], np.cumsum(pages))).astype(np.int32)),
            step.block_table[owners, places].int(),
            torch.from_numpy(lengths),
            request.local_heads,
            SIZES["latent_size"],
            SIZES["rope_size"],
            block,
            causal=False,  # one query sees everything of its sequence
            sm_scale=request.scale,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        return wrapper

    def _kernels(self) -> str:
        request, values = self._env.request, self._env.settings.values
        kernels, device = kernels_for(request, str(values.get("kernels", ""))), request.device
        if kernels == "fa3" and device is not None and device.capability != FA3_CAPABILITY:
            raise ConfigError(
                "the kernels fa3 need capability 9.0",
                field="plugins.options.flashinfer_mla.kernels",
                value=kernels,
                remedy="use fa2, or leave it out",
            )
        return kernels

    def _check_room(self, sequences: int) -> None:
        """A sequence is a piece for every 128 heads, and splits add no more than there are multiprocessors."""
        request = self._env.request
        cores = 0 if request.device is None else request.device.cores
        most = (MOST_PIECES - cores) // -(-request.local_heads // PIECE_HEADS)
        if sequences > most:
            raise ConfigError(
                f"a plan of flashinfer_mla has room for {most} sequences",
                field="scheduler.max_num_seqs",
                value=sequences,
                remedy=f"use {most} or fewer, or choose triton_mla",
            )


class FlashInferMlaLayer(TritonMlaLayer):
    """Cache and longer queries of ``triton_mla``, single tokens by FlashInfer."""

    def decode(  # type: ignore[override]  # a layer and the builder of the same backend belong together
        self, q_NHR: torch.Tensor, q_NHP: torch.Tensor, latent_GBJ: torch.Tensor, metadata: FlashInferMlaMetadata
    ) -> torch.Tensor:
        """Return [N, H, R], what single tokens mix of latents. Latents and rotated keys are two views of one cache: the
        kernels are told the strides of pages and tokens, and of queries those of tokens and heads.
        """
        out_NHR = q_NHR.new_empty(q_NHR.shape)
        latent_GBR, rope_GBP = torch.split(latent_GBJ, [self._rank, self._rope], -1)
        metadata.planned.run(q_NHR, q_NHP, latent_GBR, rope_GBP, out=out_NHR)
        return out_NHR
