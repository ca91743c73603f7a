"""Tables of running sequences, and steps over them, as numbers.

Legend: S slots, L longest text, M blocks of a sequence, B sequences, K drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from jackfield.interfaces import TokenInputs
from jackfield.layers.functional import REFERENCES

Op = Callable[..., Any]
VOCAB, BLOCK = 900, 4


@dataclass(slots=True)
class Tables:
    """Random tables, and sequences ``slots`` [B] of them that stand at ``starts`` [B]."""

    tokens: torch.Tensor
    blocks: torch.Tensor
    known: torch.Tensor
    proposed: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def make(cls, sequences: int, device: str, length: int = 61, seed: int = 0) -> Tables:
        """Return tables with more slots than sequences."""
        generator = torch.Generator().manual_seed(seed)

        def numbers(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.randint(0, high, shape, generator=generator, dtype=dtype).to(device)

        slots = torch.randperm(sequences + 3, generator=generator)[:sequences].to(device)
        return cls(
            numbers(VOCAB, sequences + 3, length, dtype=torch.int32),
            numbers(5000, sequences + 3, -(-length // BLOCK), dtype=torch.int32),
            numbers(30, sequences + 3) + 1,
            numbers(4, sequences + 3),
            slots,
            numbers(length - 20, sequences),
        )

    def copies(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return copies of what steps write: tokens, known, proposed."""
        return self.tokens.clone(), self.known.clone(), self.proposed.clone()


def check_inputs(op: Op, tables: Tables, width: int, *, cut: bool) -> None:
    """Compare what tokens take from the tables; with ``cut`` not all tokens count."""
    counts = torch.arange(len(tables.slots), device=tables.slots.device) % (width + 2) - 1 if cut else None
    given = (tables.tokens, tables.blocks, tables.slots, tables.starts, counts, width, BLOCK)
    found, wanted = op(*given), REFERENCES["token_inputs"](*given)
    for name in TokenInputs.__slots__:
        mine, theirs = getattr(found, name), getattr(wanted, name)
        assert mine.dtype == theirs.dtype, name
        assert torch.equal(mine, theirs), name


def check_rounds(begin: Op, keep: Op, end: Op, tables: Tables, width: int) -> None:
    """Compare three ops one behind the other: what they return, and what they leave in the tables."""
    count, device = len(tables.slots), tables.slots.device
    generator = torch.Generator().manual_seed(width)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(device)

    starts = torch.where(numbers(0, 2, count) > 0, tables.starts, -1)
    counts, room = numbers(0, width + 1, count), numbers(-1, width + 2, count)
    drafts = torch.where(numbers(0, 3, width, count) > 0, numbers(0, VOCAB, width, count), -1)
    found = torch.where(numbers(0, 8, count, width) > 0, numbers(0, VOCAB + 40, count, width), -1)
    noise = numbers(0, 4, count, width + 1) == 0
    sampled = numbers(0, VOCAB, count, width + 1)
    results: list[Any] = []
    for names in ((begin, keep, end), tuple(REFERENCES[n] for n in ("begin_round", "keep_tokens", "end_round"))):
        tokens, known, proposed = tables.copies()
        begun, real, texts = names[0](tokens, known, proposed, tables.slots, starts, counts, drafts)
        ids = torch.cat((texts, sampled[:, -1:]), 1)
        ids = torch.where(noise, sampled, ids)
        kept, last = names[1](tokens, known, tables.slots, begun, real, texts, ids)
        result = names[2](tokens, proposed, tables.slots, begun, kept, room, ids, found, VOCAB)
        results.append((begun, real, texts, kept, last, result, tokens, known, proposed))
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    if width and count > 8:
        assert 0 < int(results[0][3].sum()) < count * width, "some drafts are kept, and not all"


def check_single(keep: Op, tables: Tables) -> None:
    """Compare the writing of one token for each sequence, without drafts."""
    ids = torch.arange(len(tables.slots), device=tables.slots.device).unsqueeze(1) + 7
    results = []
    for op in (keep, REFERENCES["keep_tokens"]):
        tokens, known, _ = tables.copies()
        results.append((*op(tokens, known, tables.slots, tables.starts, tables.slots, ids[:, 1:], ids), tokens, known))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))


def check_greedy(op: Op, rows: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    """Compare the largest logits: rows that lie apart, equal ones, none that is above minus infinity."""
    logits = torch.randn(rows, vocab + 3, generator=torch.Generator().manual_seed(rows)).to(dtype).to(device)[:, :vocab]
    assert torch.equal(op(logits), logits.argmax(-1))
    equal = torch.zeros(rows, vocab, dtype=dtype, device=device)
    equal[:, vocab // 3 :] = 2.0
    assert op(equal).tolist() == [vocab // 3] * rows
    assert op(torch.full_like(equal, float("-inf"))).tolist() == [0] * rows
