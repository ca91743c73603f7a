"""Metadata of ``triton_mla``: single tokens for the kernels, longer queries for torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from jackfield.errors import PluginError
from jackfield.interfaces import AttentionEnv, AttentionStep, HostLengths, StepLimits
from jackfield_attention.triton_tuning import FEW_CORES, MOST_SPLITS, PROGRAMS_PER_CORE


@dataclass(frozen=True, slots=True)
class Parts:
    """Where splits leave their parts: mixed latents, maxima and totals, in float32."""

    mixed: torch.Tensor
    bests: torch.Tensor
    totals: torch.Tensor


@dataclass(frozen=True, slots=True)
class LongQuery:
    """Tokens ``start`` to ``stop`` of the step, the pages of their sequence, and its tokens: at most ``bound``, in fact
    ``length`` [] on the device.
    """

    start: int
    stop: int
    pages: torch.Tensor
    bound: int
    length: torch.Tensor


@dataclass(frozen=True, slots=True)
class MlaMetadata:
    """One step: the first ``num_decodes`` sequences go to the kernels."""

    num_decodes: int
    splits: int
    lengths: torch.Tensor
    block_table: torch.Tensor
    long: list[LongQuery]
    parts: Parts


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Heads of a program, and keys in a tile."""

    heads: int
    tile: int


def decode_shape(env: AttentionEnv) -> DecodeShape:
    """Return the shape of the decode kernel, as options say or chosen: what a program keeps of latents must fit."""
    values = env.settings.values
    heads = int(values.get("decode_heads") or 0) or 16
    narrow = env.request.dtype != "float32"
    return DecodeShape(heads, int(values.get("decode_tile") or 0) or (32 if narrow else 16))


class TritonMlaMetadataBuilder:
    """Builds the metadata of one group of layers."""

    host_lengths = HostLengths.UPPER_BOUND

    def __init__(self, env: AttentionEnv) -> None:
        self._env = env
        self._shape = decode_shape(env)
        self._limits: StepLimits | None = None
        self._parts: Parts | None = None
        self._recorded: tuple[torch.Tensor, torch.Tensor] | None = None

    def allocate(self, limits: StepLimits) -> None:
        """See MetadataBuilder."""
        env, self._limits = self._env, limits
        rank, heads = int(env.request.extra["latent_size"]), env.request.local_heads
        most = max(n * self._splits(n) for n in range(1, limits.max_sequences + 1))
        rows = most * heads
        new = torch.empty
        self._parts = Parts(
            new((rows, rank), dtype=torch.float32, device=env.device),
            new(rows, dtype=torch.float32, device=env.device),
            new(rows, dtype=torch.float32, device=env.device),
        )

    def build(self, step: AttentionStep) -> MlaMetadata:
        """See MetadataBuilder. After :meth:`capture` a step of single tokens is copied to where graphs read it."""
        _, parts = self._ready()
        count, lengths, table = step.num_decodes, step.lengths, step.block_table
        if count == step.num_sequences and self._recorded is not None:
            lengths, table = (tensor[:count] for tensor in self._recorded)
            lengths.copy_(step.lengths)
            table[:, : step.block_table.shape[1]].copy_(step.block_table)
        long = [self._long(step, b) for b in range(count, step.num_sequences)]
        return MlaMetadata(count, self._splits(count), lengths, table, long, parts)

    def capture(self, num_sequences: int, max_query: int) -> MlaMetadata:
        """See MetadataBuilder. Sequences of length 0 are harmless.

        Raises:
            NotImplementedError: queries have more than one token.
        """
        limits, parts = self._ready()
        if max_query > 1:
            raise NotImplementedError("triton_mla records steps of single tokens only")
        if self._recorded is None:
            sizes = (limits.max_sequences,), (limits.max_sequences, limits.max_blocks)
            lengths, table = (torch.zeros(size, dtype=torch.int32, device=self._env.device) for size in sizes)
            self._recorded = lengths, table
        lengths, table = (tensor[:num_sequences] for tensor in self._recorded)
        return MlaMetadata(num_sequences, self._splits(num_sequences), lengths, table, [], parts)

    def advance(self, tokens: int) -> Any:
        """Draft steps are not supported."""
        raise NotImplementedError("triton_mla does not advance")

    def _long(self, step: AttentionStep, sequence: int) -> LongQuery:
        assert step.lengths_host is not None
        start, stop = (int(place) for place in step.query_start_host[sequence : sequence + 2])
        block, bound = self._env.block_size, int(step.lengths_host[sequence])
        bound = min(bound, step.block_table.shape[1] * block)
        pages = step.block_table[sequence, : -(-bound // block)]
        return LongQuery(start, stop, pages, bound, step.lengths[sequence])

    def _splits(self, sequences: int) -> int:
        wanted = int(self._env.settings.values.get("decode_splits") or 0)
        if not wanted:
            device = self._env.request.device
            cores = device.cores if device is not None and device.cores > 1 else FEW_CORES
            blocks = -(-self._env.request.local_heads // self._shape.heads)
            wanted = cores * PROGRAMS_PER_CORE // max(1, sequences * blocks)
        assert self._limits is not None
        most = -(-self._limits.max_length // self._shape.tile)
        return max(1, min(wanted, most, MOST_SPLITS))

    def _ready(self) -> tuple[StepLimits, Parts]:
        if self._limits is None or self._parts is None:
            raise PluginError("the metadata builder of 'triton_mla' was used before its buffers were allocated")
        return self._limits, self._parts
