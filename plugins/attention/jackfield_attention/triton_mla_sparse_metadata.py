"""Metadata of ``triton_mla_sparse``: rows for its own kernels; prompts in which every token is chosen go to those of
``triton_mla``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from jackfield.interfaces import AttentionEnv, AttentionStep
from jackfield_attention.triton_mla_metadata import Contexts, LongQuery, MlaMetadata, Parts, TritonMlaMetadataBuilder


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Tokens ``start`` to ``stop`` of the step, a row each.

    Args:
        seen: [N] int32 tokens that each row sees. table: the pages of its sequence, one line for each row or one line
            for all. width: bound of ``seen``. splits: parts of what is chosen. parts: where they are left.
    """

    start: int
    stop: int
    seen: torch.Tensor
    table: torch.Tensor
    width: int
    splits: int
    parts: Parts

    @property
    def table_row(self) -> int:
        """Stride from one row's line to the next one's."""
        return self.table.stride(0) if len(self.table) > 1 else 0

    def lines(self, part: slice) -> torch.Tensor:
        """Return the lines of some rows."""
        return self.table[part] if len(self.table) > 1 else self.table


@dataclass(frozen=True, slots=True)
class SparseMlaMetadata:
    """One step: ``whole`` are sequences that attend to all they see."""

    whole: MlaMetadata
    rows: list[SparseRows]


class TritonSparseMetadataBuilder(TritonMlaMetadataBuilder):
    """Builds the metadata of one group of layers."""

    def __init__(self, env: AttentionEnv) -> None:
        super().__init__(env)
        self._topk = int(env.request.extra["index_topk"])

    def build(self, step: AttentionStep) -> SparseMlaMetadata:  # type: ignore[override]  # of another kind
        """See MetadataBuilder."""
        found = super().build(step)
        recorded = self._recorded is not None and found.num_decodes == step.num_sequences
        made = self._decodes(found, self._ready()[0].max_length if recorded else step.max_length)
        prompts = [self._prompt(step, query) for query in found.long if self._chooses(query.bound)]
        whole = [query for query in found.long if not self._chooses(query.bound)]
        return SparseMlaMetadata(replace(made.whole, long=whole), [*made.rows, *prompts])

    def contexts(self, step: AttentionStep, long: Sequence[LongQuery]) -> Contexts | None:
        """See the base class; of sequences in which every token is chosen."""
        return super().contexts(step, [query for query in long if not self._chooses(query.bound)])

    def capture(self, num_sequences: int, max_query: int) -> SparseMlaMetadata:  # type: ignore[override]
        """See MetadataBuilder."""
        return self._decodes(super().capture(num_sequences, max_query), self._ready()[0].max_length)

    def _chooses(self, length: int) -> bool:
        return length > self._topk

    def _decodes(self, found: MlaMetadata, length: int) -> SparseMlaMetadata:
        """Make rows of single tokens, unless no sequence can be so long that something is left out."""
        count = found.num_decodes
        if not count or not self._chooses(length):
            return SparseMlaMetadata(found, [])
        seen, table = found.lengths[:count], found.block_table[:count]
        width = min(length, table.shape[1] * self._env.block_size)
        rows = SparseRows(0, count, seen, table, width, found.splits, found.parts)
        return SparseMlaMetadata(replace(found, num_decodes=0), [rows])

    def _prompt(self, step: AttentionStep, query: LongQuery) -> SparseRows:
        limits, parts = self._ready()
        seen = (step.positions[query.start : query.stop] + 1).to(torch.int32)
        count = query.stop - query.start
        # There is room for the parts of as many rows as there may be sequences.
        splits = self._splits(count) if count <= limits.max_sequences else 1
        return SparseRows(query.start, query.stop, seen, query.pages.unsqueeze(0), query.bound, splits, parts)
