"""What comes out follows the target's distribution, whatever the drafts were drawn from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch
from markov_world import START, Floats, MarkovDrafter, MarkovWorld, chi_square, frequencies, joint

from jackfield.interfaces import DraftBatch, Drafts
from jackfield.sampling.verification import VerificationMethod

VOCAB, LENGTH, DRAWS, FEW = 4, 3, 100_000, 25_000
TARGET = torch.tensor([[1.0, 0.2, -0.5, 0.6], [0.0, 1.5, 0.3, -1.0], [0.4, 0.4, 0.9, -0.2], [2.0, -0.3, 0.1, 0.5]])
DRAFT = torch.tensor([[0.1, 0.9, 0.3, -0.4], [0.7, 0.5, 0.0, 0.2], [-0.6, 1.1, 0.8, 0.3], [0.9, 0.2, -0.8, 1.3]])
METHODS: tuple[VerificationMethod, ...] = ("standard", "block")
CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 2},
    {"top_p": 0.7, "temperature": 1.5},
    {"min_p": 0.4},
    {"top_k": 3, "min_p": 0.1, "top_p": 0.9},
    {"repetition_penalty": 1.6},
    {"presence_penalty": 0.8, "frequency_penalty": 0.5, "top_k": 3},
]


def softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def distribution(before: Sequence[int], case: dict[str, Any]) -> Floats:
    """Return what the target draws from behind ``before``, by the documented order of operations, one by one."""
    logits = TARGET[before[-1] if before else START].double().numpy().copy()
    for token in {START, *before}:
        rate = case.get("repetition_penalty", 1.0)
        logits[token] = logits[token] / rate if logits[token] > 0 else logits[token] * rate
    for token in set(before):
        logits[token] -= case.get("presence_penalty", 0.0) + case.get("frequency_penalty", 0.0) * before.count(token)
    p = softmax(logits / case.get("temperature", 1.0))
    p[p < case.get("min_p", 0.0) * p.max()] = 0.0
    order = sorted(range(VOCAB), key=lambda i: (-p[i], i))
    if case.get("top_k"):
        p[order[case["top_k"] :]] = 0.0
    p /= p.sum()
    mass = 0.0
    for token in order:
        if mass >= case.get("top_p", 1.0):
            p[token] = 0.0
        mass += p[token]
    return np.asarray(p / p.sum())


def run(method: VerificationMethod, case: dict[str, Any], **options: Any) -> tuple[npt.NDArray[np.int64], MarkovWorld]:
    drafter = MarkovDrafter(DRAFT, 3, own=options.pop("own", False))
    world = MarkovWorld(TARGET, drafter, options.pop("count", DRAWS), 3, method, **options, **case)
    tokens = world.run(LENGTH)
    assert world.speculation.drafter is drafter, "the drafter was switched off"
    return tokens, world


QUICK = (0, 5, 7)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=",".join(case) or "plain", marks=() if at in QUICK else pytest.mark.slow)
        for at, case in enumerate(CASES)
    ],
)
def test_sequences_over_several_rounds_follow_the_target(method: VerificationMethod, case: dict[str, Any]) -> None:
    tokens, world = run(method, case, count=FEW if case else DRAWS)
    expected = joint(lambda before: distribution(list(before), case), VOCAB, LENGTH)
    statistic, limit = chi_square(frequencies(tokens, VOCAB), expected)
    assert statistic < limit
    assert 0.2 < world.kept[0] < 2.9, "drafts must be kept and refused for this to mean anything"


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_may_draw_by_itself(method: VerificationMethod) -> None:
    tokens, _ = run(method, {"temperature": 0.8}, own=True, count=FEW)
    expected = joint(lambda before: distribution(list(before), {"temperature": 0.8}), VOCAB, LENGTH)
    statistic, limit = chi_square(frequencies(tokens, VOCAB), expected)
    assert statistic < limit


def test_the_test_would_see_a_wrong_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeping every draft that the target could have drawn gives another distribution."""
    import jackfield.worker.speculation as module

    def keep_all(p: Any, q: Any, drafts: Any, counts: Any, u: Any, last: Any, method: Any) -> Any:
        return counts, p[torch.arange(len(counts)), counts].argmax(-1)

    monkeypatch.setattr(module, "keep_drawn", keep_all)
    tokens, _ = run("standard", {}, count=20_000)
    statistic, limit = chi_square(frequencies(tokens, VOCAB), joint(lambda b: distribution(b, {}), VOCAB, LENGTH))
    assert statistic > 10 * limit


def test_drafts_are_kept_as_often_as_theory_says() -> None:
    """One by one, the first draft is kept with probability sum(min(p, q)); a block keeps more in all (Sun et al.)."""
    p, q = softmax(TARGET.double().numpy()[START]), softmax(DRAFT.double().numpy()[START])
    after_p = [softmax(row) for row in TARGET.double().numpy()]
    after_q = [softmax(row) for row in DRAFT.double().numpy()]
    first = np.minimum(p, q)
    second = sum(first[x] * np.minimum(after_p[x], after_q[x]) for x in range(VOCAB))
    third = sum(second[x] * np.minimum(after_p[x], after_q[x]).sum() for x in range(VOCAB))
    expected = first.sum() + second.sum() + third
    kept = {}
    for method in METHODS:
        world = MarkovWorld(TARGET, MarkovDrafter(DRAFT, 3), 2 * FEW, 3, method, max_tokens=9)
        world.drafts, world.parents = world.speculation.propose(world.slots, world.known, None) or (None, None)
        world.round()
        kept[method] = world.kept[0]
    assert kept["standard"] == pytest.approx(expected, abs=0.012)
    assert kept["block"] > kept["standard"] + 0.01


def test_a_draft_model_that_is_the_target_has_every_draft_kept() -> None:
    for method in METHODS:
        world = MarkovWorld(TARGET, MarkovDrafter(TARGET, 3), 2000, 3, method, temperature=0.7, top_k=3)
        world.run(12)
        assert world.kept == [3.0] * len(world.kept)


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_gives_the_same_tokens_again_whoever_else_is_there(method: VerificationMethod) -> None:
    many, _ = run(method, {"temperature": 1.2}, count=64)
    few, _ = run(method, {"temperature": 1.2}, count=16)
    other, _ = run(method, {"temperature": 1.2}, count=64, seed=1)
    assert (many[:16] == few).all()
    assert (many != other).any()


def test_greedy_requests_take_the_largest_logit_and_keep_drafts_that_are_it() -> None:
    world = MarkovWorld(TARGET, MarkovDrafter(DRAFT, 3), 3, 3, temperature=0.0)
    tokens = world.run(8)
    expected, last = [], START
    for _ in range(8):
        last = int(TARGET[last].argmax())
        expected.append(last)
    assert tokens.tolist() == [expected] * 3


class Certain(MarkovDrafter):
    """Proposes the most likely tokens behind the last one, or nothing (-1)."""

    silent: ClassVar[bool] = False

    def propose(self, batch: DraftBatch) -> Drafts:
        assert batch.token_ids is not None
        last = torch.from_numpy(batch.token_ids[batch.slots, batch.lengths - 1].astype(np.int64))
        ids = self._table[last].argsort(descending=True)[:, : self._width]
        return Drafts(torch.full_like(ids, -1) if self.silent else ids)


class Silent(Certain):
    silent = True


def test_certain_drafts_change_no_draw() -> None:
    alone = MarkovWorld(TARGET, Silent(DRAFT, 3), 500, 3).run(6)
    world = MarkovWorld(TARGET, Certain(DRAFT, 3), 500, 3)
    assert (world.run(6) == alone).all()
    assert world.kept[0] > 0.1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda q: q * 0.9, "no distribution"),
        (lambda q: q - 0.1 + 0.1 * 4 * torch.eye(4)[0], "no distribution"),
        (lambda q: torch.full_like(q, float("nan")), "no distribution"),
        (lambda q: q[:, :, :3], r"probabilities of drafts are \[50, 3, 4\], not \[50, 3, 3\]"),
        (lambda q: q.roll(1, 2) * (q.argmax(2, keepdim=True) < 0), "no distribution"),
        (lambda q: torch.eye(4)[:1].expand(50, 3, 4), "probability 0"),
        (lambda q: q[:10], "probabilities of drafts"),
    ],
)
def test_a_drafter_that_lies_about_its_probabilities_is_switched_off(
    change: Any, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Liar(MarkovDrafter):
        def propose(self, batch: Any) -> Any:
            found = super().propose(batch)
            assert found.probabilities is not None
            found.probabilities = change(found.probabilities)
            return found

    world = MarkovWorld(TARGET, Liar(DRAFT, 3, own=True), 50, 3)
    world.run(5)
    assert world.speculation.drafter is None
    (record,) = caplog.records
    assert record.getMessage() == "drafter markov failed and is switched off; requests go on without drafts"
    assert record.exc_info is not None and record.exc_info[1] is not None
    assert re.search(complaint, str(record.exc_info[1]))


def test_drafts_that_are_not_what_was_drawn_switch_the_drafter_off(caplog: pytest.LogCaptureFixture) -> None:
    """Their distribution is not known, so that nothing could be said of what comes out."""

    class Other(MarkovDrafter):
        def propose(self, batch: DraftBatch) -> Drafts:
            found = super().propose(batch)
            found.ids[:, 1] = (found.ids[:, 1] + 1) % VOCAB
            return found

    world = MarkovWorld(TARGET, Other(DRAFT, 3), 50, 3)
    world.run(5)
    assert world.speculation.drafter is None
    assert "drafts are not the ids that were drawn" in str(caplog.records[0].exc_info)
