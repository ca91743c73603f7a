"""Drafters that do what no drafter should, and one that is often right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from plain_attention import Plain
from recording_platform import RecordingPlatform

from jackfield import LLM
from jackfield.interfaces import ANY, DraftBatch, Drafter, DrafterEnv, DraftOutcome, Drafts, Settings

RECORDED: dict[str, Any] = {
    "plugins": [RecordingPlatform, Plain],
    "platform": "recording",
    "attention": "plain",
    # What is recorded are ops of torch: C functions would be called once, while the recording is made.
    "ops": "torch",
    "plugins.disable": ("native_dense",),
    "max_num_seqs": 4,
}
"""Settings of an engine that records its rounds."""


class TestDrafter(Drafter):
    """Base: built without anything."""

    __test__ = False
    kinds: ClassVar[frozenset[str]] = ANY

    def __init__(self, env: DrafterEnv) -> None:
        self.width = env.request.num_tokens
        self.random = np.random.default_rng(7)
        self.calls = 0

    @classmethod
    def build(cls, env: DrafterEnv) -> TestDrafter:
        return cls(env)

    def propose(self, batch: DraftBatch) -> Drafts:
        self.calls += 1
        return Drafts(self.ids(batch))

    def ids(self, batch: DraftBatch) -> Any:
        return self.random.integers(0, 260, (len(batch.slots), self.width))


class Guessing(TestDrafter):
    name = "guessing"


class Illegal(TestDrafter):
    name = "illegal"

    def ids(self, batch: DraftBatch) -> Any:
        return self.random.choice([-5, 97, 98, 260, 2**31 - 1, 2**40 + 97], (len(batch.slots), self.width))


class Repeating(TestDrafter):
    """The last token again, far more often than asked for."""

    name = "repeating"

    def ids(self, batch: DraftBatch) -> Any:
        assert batch.token_ids is not None
        last = batch.token_ids[batch.slots, batch.lengths - 1]
        return np.repeat(last[:, None], 40, axis=1)


class Knowing(TestDrafter):
    """Knows what is said, and makes mistakes."""

    name = "knowing"
    mistakes: ClassVar[float] = 0.2
    texts: ClassVar[list[list[int]]] = []
    """Prompt and answer of each request."""

    def ids(self, batch: DraftBatch) -> Any:
        assert batch.token_ids is not None
        ids = np.full((len(batch.slots), self.width), -1)
        for row, (slot, length) in enumerate(zip(batch.slots.tolist(), batch.lengths.tolist(), strict=True)):
            said = batch.token_ids[slot, :length].tolist()
            for text in self.texts:
                if text[:length] == said:
                    more = text[length : length + self.width]
                    ids[row, : len(more)] = more
        wrong = self.random.random(ids.shape) < self.mistakes
        return np.where(wrong & (ids >= 0), self.random.integers(0, 260, ids.shape), ids)


class Branching(Knowing):
    """Knows what is said, and drafts much else beside it: of every draft some other one may be the parent."""

    name = "branching"
    mistakes: ClassVar[float] = 0.05

    @classmethod
    def branches(cls, settings: Settings) -> bool:
        return True

    def propose(self, batch: DraftBatch) -> Drafts:
        known = self.ids(batch)
        ids, parents = np.full_like(known, -1), np.full_like(known, -1)
        for row, line in enumerate(known.tolist()):
            tip, at = -1, 0
            for index in range(self.width):
                if line[at] >= 0 and self.random.random() < 0.7:
                    ids[row, index], parents[row, index] = line[at], tip
                    tip, at = index, at + 1
                else:
                    ids[row, index] = self.random.integers(0, 260)
                    parents[row, index] = self.random.integers(-1, index) if index else -1
        return Drafts(ids, parents)


class Undeclared(Branching):
    """Does not say that its drafts branch."""

    name = "undeclared"

    @classmethod
    def branches(cls, settings: Settings) -> bool:
        return False


class Backwards(Branching):
    """Children come before their parents."""

    name = "backwards"

    def propose(self, batch: DraftBatch) -> Drafts:
        found = super().propose(batch)
        found.parents[:, 0] = 1
        return found


class Raising(TestDrafter):
    """Works twice, then raises."""

    name = "raising"

    def ids(self, batch: DraftBatch) -> Any:
        if self.calls > 2:
            raise RuntimeError("no more ideas")
        return super().ids(batch)


class Vandal(TestDrafter):
    """Writes into what it was given to read."""

    name = "vandal"

    def ids(self, batch: DraftBatch) -> Any:
        assert batch.token_ids is not None
        batch.token_ids[:] = 3


class Shapeless(TestDrafter):
    name = "shapeless"

    def ids(self, batch: DraftBatch) -> Any:
        return np.zeros((len(batch.slots) + 1, self.width), dtype=np.int32)


class Fractions(TestDrafter):
    name = "fractions"

    def ids(self, batch: DraftBatch) -> Any:
        return np.full((len(batch.slots), self.width), 97.5)


class Nothing(TestDrafter):
    name = "nothing"

    def propose(self, batch: DraftBatch) -> Drafts:
        return None  # type: ignore[return-value]


class Deaf(TestDrafter):
    """Raises when it is told what became of its drafts."""

    name = "deaf"

    def observe(self, outcome: DraftOutcome) -> None:
        raise RuntimeError("not listening")


class Clinging(TestDrafter):
    """Raises when it must forget."""

    name = "clinging"

    def forget(self, slots: Sequence[int]) -> None:
        raise RuntimeError("never")


HOSTILE: tuple[type[TestDrafter], ...] = (Guessing, Illegal, Repeating, Knowing, Branching)
FAILING: tuple[type[TestDrafter], ...] = (
    *(Raising, Vandal, Shapeless, Fractions, Nothing, Deaf, Clinging),
    *(Undeclared, Backwards),
)


def watch(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """Return a list that fills with texts and the drafts behind them."""
    runner = llm._core._executor.worker._runner  # type: ignore[attr-defined]
    inner, tables = runner._speculation.propose, runner._parts.batch.tokens
    seen: list[tuple[list[int], list[int]]] = []

    def spy(slots: Any, lengths: Any, *rest: Any) -> Any:
        drafts = inner(slots, lengths, *rest)
        for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            found = [] if drafts is None else [t for t in drafts[0][row].tolist() if t >= 0]
            seen.append((tables[slot, :length].tolist(), found))
        return drafts

    runner._speculation.propose = spy
    rounds = runner._parts.rounds
    if rounds is not None:
        _watch_rounds(rounds, tables, seen)
    return seen


def _watch_rounds(rounds: Any, tables: Any, seen: list[tuple[list[int], list[int]]]) -> None:
    verify, draft = rounds.verify, rounds.draft
    slots: list[int] = []

    def verified(plan: Any) -> Any:
        slots[:] = plan.slots.tolist()
        return verify(plan)

    def drafted(count: int) -> Any:
        result = draft(count)
        for slot, row in zip(slots, result.tolist(), strict=True):
            found = [t for t in row[len(row) // 2 + 1 :] if t >= 0]
            seen.append((tables[slot, : int(rounds._batch.known[slot])].tolist(), found))
        return result

    rounds.verify, rounds.draft = verified, drafted
