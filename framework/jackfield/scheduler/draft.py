"""Sizes of a step, and a step's plan while it is being made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jackfield.protocol import NewSequence, Recordings


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Sizes of a step.

    Args:
        max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens of a step. max_model_len: tokens of a
            sequence.
        long_prefill_threshold: most tokens of one prompt in one step; 0: no such limit. chunked_prefill: whether
            prompts may be cut.
        num_drafts: draft tokens a sequence may have in a step. lookahead: tokens behind the computed ones that need
            room in the cache, for draft models. adaptive_drafts: give sequences as many drafts as pay. drafts_drawn:
            tokens of requests that sample depend on how many drafts they had. largest_draft_batch: sequences of a step
            beyond which there are no drafts, or None. recordings: what the worker recorded of rounds.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_threshold: int = 0
    chunked_prefill: bool = True
    num_drafts: int = 0
    lookahead: int = 0
    adaptive_drafts: bool = True
    drafts_drawn: bool = False
    largest_draft_batch: int | None = None
    recordings: Recordings = field(default_factory=Recordings)


@dataclass(slots=True)
class PlanDraft:
    """The plan under construction.

    Args:
        budget: tokens that are left. slots, counts: sequences of the step and their new tokens. new: sequences that
            take a slot. blocks: per cache group slots, places in their block tables, and block ids.
    """

    budget: int
    slots: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    blocks: list[tuple[list[int], list[int], list[int]]] = field(default_factory=list)

    def add(self, slot: int, count: int) -> None:
        """Give a sequence ``count`` tokens."""
        self.slots.append(slot)
        self.counts.append(count)
        self.budget -= count

    def note_blocks(self, slot: int, firsts: Sequence[int], added: Sequence[list[int]]) -> None:
        """Note blocks that a slot's tables got, per cache group, from its place in ``firsts`` on."""
        for (slots, places, ids), first, blocks in zip(self.blocks, firsts, added, strict=True):
            slots += [slot] * len(blocks)
            places += range(first, first + len(blocks))
            ids += blocks
