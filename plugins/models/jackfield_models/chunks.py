"""What configurations say on dual-chunk attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jackfield.errors import CheckpointError
from jackfield.interfaces import ConfigReader


@dataclass(frozen=True, kw_only=True, slots=True)
class DualChunks:
    """Dual-chunk attention (arXiv:2402.17463): distances are counted anew in each chunk.

    Args:
        length: tokens in a chunk. reach: the largest distance that is told apart. original: longest text of the
            training, from which on queries have a factor; 0: they never have one. dense: length from which on
            prefill attends to few keys, or None.
    """

    length: int
    reach: int
    original: int = 0
    dense: int | None = None

    def features(self) -> dict[str, int]:
        """Return what texts longer than so many tokens need: within a chunk it is attention as usual."""
        return {"dual_chunk": self.length} | ({} if self.dense is None else {"sparse_prefill": self.dense})

    def extra(self) -> dict[str, Any]:
        """Return the sizes for attention groups."""
        return {"chunk_length": self.length, "chunk_reach": self.reach, "original_length": self.original}


def read_chunks(hf: ConfigReader) -> DualChunks | None:
    """Return what the configuration says on dual-chunk attention, or None.

    Raises:
        CheckpointError: a size is absent, or there is no chunk between them.
    """
    said = hf.section("dual_chunk_attention_config")
    if said is None:
        return None
    reach, local = int(said.require("chunk_size", int)), int(said.require("local_size", int))
    if not 0 <= local < reach:
        raise CheckpointError(
            "chunks of dual-chunk attention must be larger than what is local",
            field="config.json: dual_chunk_attention_config.local_size",
            value=local,
            remedy="correct the configuration",
        )
    heads, last = said.get("sparse_attention_config"), said.get("sparse_attention_threshold", 32768)
    said.ignore("sparse_attention_last_q")
    return DualChunks(
        length=reach - local,
        reach=reach,
        original=int(said.get("original_max_position_embeddings", 0)),
        dense=int(last) if said.get("sparse_attention_enabled", heads is not None) else None,
    )
