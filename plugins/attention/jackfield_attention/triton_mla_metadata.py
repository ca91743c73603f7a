"""Metadata of ``triton_mla``: single tokens for one kernel, longer queries in tiles for another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jackfield.errors import PluginError
from jackfield.interfaces import AttentionEnv, AttentionStep, HostLengths, StepLimits
from jackfield_attention.transfer import sent
from jackfield_attention.triton_tuning import FEW_CORES, MOST_SPLITS, PROGRAMS_PER_CORE, KernelShape, roomy
from jackfield_triton.launch import has_gluon


@dataclass(frozen=True, slots=True)
class Parts:
    """Where splits leave their parts: mixed latents, maxima and totals, in float32."""

    mixed: torch.Tensor
    bests: torch.Tensor
    totals: torch.Tensor


@dataclass(frozen=True, slots=True)
class LongQuery:
    """Tokens ``start`` to ``stop`` of the step, their ``sequence`` and its pages, and how many tokens that has at
    most.
    """

    sequence: int
    start: int
    stop: int
    pages: torch.Tensor
    bound: int


@dataclass(frozen=True, slots=True)
class ContextPart:
    """Tokens that are expanded together: ``pages`` and ``offsets`` [L] of each, and ``tiles`` [N, 6] of the queries
    that see some of them (``triton_mla_prefill_kernels``).
    """

    pages: torch.Tensor
    offsets: torch.Tensor
    tiles: torch.Tensor


@dataclass(frozen=True, slots=True)
class Contexts:
    """The contexts of longer queries. ``several``: some query sees tokens of several parts."""

    parts: list[ContextPart]
    query_start: torch.Tensor
    several: bool


@dataclass(frozen=True, slots=True)
class MlaMetadata:
    """One step: the first ``num_decodes`` sequences are single tokens."""

    num_decodes: int
    splits: int
    lengths: torch.Tensor
    block_table: torch.Tensor
    long: list[LongQuery]
    parts: Parts
    contexts: Contexts | None = None


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """How decode is launched.

    Args:
        heads: of a program. tile: keys in a tile. warps: of a program. stages: tiles in flight. programs: that a
            multiprocessor has at once. tiled: it is ``mla_tiles_kernel`` that is launched.
    """

    heads: int
    tile: int
    warps: int = 8
    stages: int = 2
    programs: int = PROGRAMS_PER_CORE
    tiled: bool = False


def decode_shape(env: AttentionEnv) -> DecodeShape:
    """Return the shape of the decode kernel, as options say or chosen: what a program keeps of latents must fit."""
    values = env.settings.values
    heads, tile = int(values.get("decode_heads") or 0), int(values.get("decode_tile") or 0)
    if not heads and not tile and _has_tiles(env):
        few = env.request.local_heads <= FEW_HEADS
        return DecodeShape(FEW_HEADS if few else MANY_HEADS, TILE, 4 if few else 8, 1, programs=1, tiled=True)
    if env.request.dtype == "float32":
        return DecodeShape(heads or 16, tile or 16)
    if env.request.cache_dtype not in ("", env.request.dtype):
        return DecodeShape(heads or 16, tile or 32, 8, 3)
    device = env.request.device
    if device is None or device.capability not in ROOMIEST or env.request.local_heads < MANY_HEADS:
        return DecodeShape(heads or 16, tile or 32, 4, 3)
    return DecodeShape(heads or 64, tile or 64, 8, 2)


def _has_tiles(env: AttentionEnv) -> bool:
    """Return whether ``mla_tiles_kernel`` takes such latents, and the device and the installed Triton have what it
    needs.
    """
    request, extra = env.request, env.request.extra
    if request.device is None or request.device.capability != (9, 0):
        return False
    fits = int(extra["latent_size"]) in (256, 512) and int(extra["rope_size"]) == TILE and env.block_size % TILE == 0
    plain = request.dtype in ("bfloat16", "float16") and request.cache_dtype in ("", request.dtype)
    return fits and plain and has_gluon()


def prefill_shape(env: AttentionEnv) -> KernelShape:
    """Return the shape of the kernel of longer queries: rows are new tokens."""
    narrow = env.request.dtype != "float32"
    if roomy(env):
        return KernelShape(128, 64 if narrow else 32, 8, 2)
    return KernelShape(64, 32, 4, 2) if narrow else KernelShape(32, 16, 4, 1)


MANY_HEADS = 64
"""From so many heads on, matrix units are what limits, and want large tiles."""
FEW_HEADS = 16
TILE = 64
"""Tokens of a tile of ``mla_tiles_kernel``, and rotated features of a key."""
ROOMIEST = frozenset({(9, 0), (10, 0), (10, 3)})
"""Capabilities whose multiprocessors have room for three such tiles."""
FIRST, LAST = 1, 2
WHOLE = FIRST | LAST


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens ``first`` to ``stop`` of a longer query's context, at ``place`` in their part."""

    query: int
    first: int
    stop: int
    place: int

    @property
    def count(self) -> int:
        """How many there are."""
        return self.stop - self.first


def _packed(bounds: Sequence[int], most: int) -> Iterator[list[Piece]]:
    """Return parts of at most ``most`` tokens; contexts of ``bounds`` tokens follow one another."""
    part: list[Piece] = []
    room = most
    for query, bound in enumerate(bounds):
        first = 0
        while first < bound:
            stop = min(bound, first + room)
            part.append(Piece(query, first, stop, most - room))
            room -= stop - first
            first = stop
            if not room:
                yield part
                part, room = [], most
    if part:
        yield part


def _tiles(part: Sequence[Piece], long: Sequence[LongQuery], each: int) -> npt.NDArray[np.int32]:
    """Return [N, 6]: every tile of ``each`` queries that may see something of the part, those that see most first."""
    rows = []
    for piece in part:
        query = long[piece.query]
        kept = query.bound - (query.stop - query.start)
        for first in range(0, query.stop - query.start, each):
            end = min(kept + first + each, query.bound)
            if piece.first < end:
                flags = FIRST * (piece.first == 0) | LAST * (piece.stop >= end)
                rows.append((query.sequence, first, piece.place, piece.first, piece.stop, flags))
    found = np.array(rows, dtype=np.int32).reshape(-1, 6)
    return found[np.argsort(-found[:, 1], kind="stable")]


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
        return MlaMetadata(count, self._splits(count), lengths, table, long, parts, self.contexts(step, long))

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

    def contexts(self, step: AttentionStep, long: Sequence[LongQuery]) -> Contexts | None:
        """Return the contexts of longer queries, in parts of at most ``context_part`` tokens."""
        if not long:
            return None
        block, most = self._env.block_size, max(1, int(self._env.settings.values["context_part"]))
        parts = list(_packed([query.bound for query in long], most))
        owners = np.concatenate([np.full(piece.count, long[piece.query].sequence) for part in parts for piece in part])
        tokens = np.concatenate([np.arange(piece.first, piece.stop) for part in parts for piece in part])
        each = prefill_shape(self._env).rows
        tiles = [_tiles(part, long, each) for part in parts]
        owner, token = (sent(array.astype(np.int64), self._env.device) for array in (owners, tokens))
        pages, offsets = step.block_table[owner, token // block].long(), token % block
        sent_tiles = torch.split(sent(np.concatenate(tiles), self._env.device), [len(rows) for rows in tiles])
        cuts = [sum(piece.count for piece in part) for part in parts]
        found = map(ContextPart, torch.split(pages, cuts), torch.split(offsets, cuts), sent_tiles)
        several = any(bool((rows[:, 5] != WHOLE).any()) for rows in tiles)
        return Contexts(list(found), step.query_start, several)

    def _long(self, step: AttentionStep, sequence: int) -> LongQuery:
        assert step.lengths_host is not None
        start, stop = (int(place) for place in step.query_start_host[sequence : sequence + 2])
        block, bound = self._env.block_size, int(step.lengths_host[sequence])
        bound = min(bound, step.block_table.shape[1] * block)
        pages = step.block_table[sequence, : -(-bound // block)]
        return LongQuery(sequence, start, stop, pages, bound)

    def _splits(self, sequences: int) -> int:
        wanted = int(self._env.settings.values.get("decode_splits") or 0)
        if not wanted:
            device = self._env.request.device
            cores = device.cores if device is not None and device.cores > 1 else FEW_CORES
            blocks = -(-self._env.request.local_heads // self._shape.heads)
            wanted = cores * self._shape.programs // max(1, sequences * blocks)
        assert self._limits is not None
        most = -(-self._limits.max_length // self._shape.tile)
        return max(1, min(wanted, most, MOST_SPLITS))

    def _ready(self) -> tuple[StepLimits, Parts]:
        if self._limits is None or self._parts is None:
            raise PluginError("the metadata builder of 'triton_mla' was used before its buffers were allocated")
        return self._limits, self._parts
