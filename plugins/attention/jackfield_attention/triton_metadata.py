"""Metadata of the Triton attention kernels: which sequences go to which kernel, and where parts are kept.

A step of short queries only (decode, verification of drafts) needs no copy and no allocation: everything that differs
from step to step is on the device, and the shape of the launch follows from the number of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from jackfield.errors import PluginError
from jackfield.interfaces import AttentionEnv, AttentionStep, HostLengths, StepLimits, TreeMask
from jackfield_attention.transfer import sent
from jackfield_attention.tree_cells import bits_in_windows
from jackfield_attention.triton_tuning import (
    MOST_SPLITS,
    SHORT_ROWS,
    DecodePlan,
    decode_plan,
    decode_programs,
    group_of,
    prefill_shape,
)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Where splits leave their parts: rows' mixed values, maxima and totals in float32, and arrival counters (0)."""

    parts: torch.Tensor
    bests: torch.Tensor
    totals: torch.Tensor
    counters: torch.Tensor


@dataclass(frozen=True, slots=True)
class Branches:
    """What tokens see where drafts branch, [T] each: base and bits of :class:`TreeMask`, those of ancestors in front of
    a window cleared, and positions in the text, int32.
    """

    base: torch.Tensor
    bits: torch.Tensor
    text: torch.Tensor


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    """One step. The first ``num_short`` sequences go to the decode kernel, ``tiles`` [N, 2] to the prefill kernel."""

    num_short: int
    plan: DecodePlan
    query_start: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    tiles: torch.Tensor | None
    scratch: Scratch
    branches: Branches | None = None


@dataclass(slots=True)
class Recorded:
    """Tensors that recorded graphs read; :meth:`TritonMetadataBuilder.build` fills them."""

    lengths: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor


class TritonMetadataBuilder:
    """Builds the metadata of one group of layers."""

    host_lengths = HostLengths.UPPER_BOUND

    def __init__(self, env: AttentionEnv) -> None:
        self._env = env
        self._group = group_of(env)
        self._tokens_in_tile = prefill_shape(env).rows // self._group
        self._limits: StepLimits | None = None
        self._scratch: Scratch | None = None
        self._advanced: torch.Tensor | None = None
        self._recorded: Recorded | None = None
        self._last: TritonMetadata | None = None

    def allocate(self, limits: StepLimits) -> None:
        """See MetadataBuilder."""
        env, device = self._env, self._env.device
        pairs = limits.max_sequences * env.request.local_kv_heads
        # Only launches of two splits or more leave parts: there are never more than the wanted programs, unless the
        # user set the number of splits.
        rows = decode_programs(env) * 16
        rows = max(rows, pairs * SHORT_ROWS * 2 * min(MOST_SPLITS, int(env.settings.values.get("decode_splits") or 0)))
        self._limits = limits
        self._advanced = torch.zeros(limits.max_sequences, dtype=torch.int32, device=device)
        self._scratch = Scratch(
            torch.empty((rows, env.request.head_size), dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.zeros(pairs, dtype=torch.int32, device=device),
        )

    def build(self, step: AttentionStep) -> TritonMetadata:
        """See MetadataBuilder. After :meth:`capture` a step of short queries is copied to where graphs read it."""
        limits, scratch = self._ready()
        all_short = self._is_short(step.max_query)
        num_short = step.num_sequences if all_short else step.num_decodes
        built = TritonMetadata(
            num_short,
            self._plan(num_short, step.max_query if all_short else 1),
            step.query_start,
            step.lengths,
            step.block_table,
            None if all_short else sent(self._tiles(step), self._env.device),
            scratch,
            None if step.tree is None else self._branches(step, step.tree),
        )
        recorded = self._recorded is not None and all_short and step.tree is None
        self._last = self._record(built, limits) if recorded else built
        return self._last

    def capture(self, num_sequences: int, max_query: int) -> TritonMetadata:
        """See MetadataBuilder. Sequences of length 0 are harmless.

        Raises:
            NotImplementedError: queries of that size do not go to the decode kernel.
        """
        limits, scratch = self._ready()
        if not self._is_short(max_query):
            raise NotImplementedError(f"triton records queries of at most {SHORT_ROWS // self._group} tokens")
        if self._recorded is None:
            self._recorded = self._new_recorded(limits)
        recorded = self._recorded
        starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=self._env.device) * max_query
        recorded.query_start[: num_sequences + 1].copy_(starts)
        plan = self._plan(num_sequences, max_query)
        return self._of_recorded(num_sequences, plan, recorded, scratch)

    def advance(self, tokens: int) -> TritonMetadata:
        """See MetadataBuilder. Every sequence of the last step goes on with one new token."""
        self._ready()
        assert self._advanced is not None
        if self._last is None:
            raise NotImplementedError("triton has no step to go on from")
        count = len(self._last.lengths)
        lengths = self._advanced[:count]
        torch.add(self._last.lengths, tokens, out=lengths)
        self._last = replace(
            self._last, num_short=count, plan=self._plan(count, 1), lengths=lengths, tiles=None, branches=None
        )
        return self._last

    def _branches(self, step: AttentionStep, tree: TreeMask) -> Branches:
        window, bits = self._env.request.window, tree.bits
        if window:
            text = tree.positions_host
            chunked = self._env.request.kind == "chunked_local"
            first = text // window * window if chunked else text - window + 1
            bits = sent(bits_in_windows(step, tree, first), self._env.device)
        return Branches(tree.base, bits, step.positions.to(torch.int32))

    def _ready(self) -> tuple[StepLimits, Scratch]:
        if self._limits is None or self._scratch is None:
            raise PluginError("the metadata builder of 'triton' was used before its buffers were allocated")
        return self._limits, self._scratch

    def _is_short(self, max_query: int) -> bool:
        return max_query == 1 or self._group * max_query <= SHORT_ROWS

    def _plan(self, sequences: int, max_query: int) -> DecodePlan:
        limits, _ = self._ready()
        return decode_plan(self._env, sequences, max_query, limits.max_length)

    def _new_recorded(self, limits: StepLimits) -> Recorded:
        size, device = limits.max_sequences, self._env.device
        return Recorded(
            torch.zeros(size, dtype=torch.int32, device=device),
            torch.zeros((size, limits.max_blocks), dtype=torch.int32, device=device),
            torch.zeros(size + 1, dtype=torch.int32, device=device),
        )

    def _record(self, built: TritonMetadata, limits: StepLimits) -> TritonMetadata:
        recorded, count = self._recorded, built.num_short
        assert recorded is not None
        recorded.lengths[:count].copy_(built.lengths)
        recorded.block_table[:count, : built.block_table.shape[1]].copy_(built.block_table)
        recorded.query_start[: count + 1].copy_(built.query_start)
        return self._of_recorded(count, built.plan, recorded, built.scratch)

    @staticmethod
    def _of_recorded(count: int, plan: DecodePlan, recorded: Recorded, scratch: Scratch) -> TritonMetadata:
        return TritonMetadata(
            count,
            plan,
            recorded.query_start[: count + 1],
            recorded.lengths[:count],
            recorded.block_table[:count],
            None,
            scratch,
        )

    def _tiles(self, step: AttentionStep) -> npt.NDArray[np.int32]:
        """Return [N, 2] sequence and first new token of each tile, those with most keys first."""
        counts = np.diff(step.query_start_host[step.num_decodes : step.num_sequences + 1]).astype(np.int64)
        tiles = -(-counts // self._tokens_in_tile)
        owner = np.repeat(np.arange(len(counts)), tiles)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        first = within * self._tokens_in_tile
        keys = first
        if step.lengths_host is not None:
            kept = step.lengths_host[step.num_decodes : step.num_sequences] - counts
            keys = first + kept[owner]
        order = np.argsort(-keys, kind="stable")
        return np.stack((owner + step.num_decodes, first), axis=1)[order].astype(np.int32)
