"""Rounds of speculation that are replayed give the tokens of plain decoding."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from jackfield import LLM, SamplingParams
from jackfield.interfaces import (
    ANY,
    DraftBatch,
    Drafter,
    DrafterEnv,
    DraftRound,
    Drafts,
    GraphSupport,
    TargetStep,
)
from recorded.conftest import VOCAB, Start

COUNT = 24
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
SPECULATION: dict[str, Any] = {"speculative.num_speculative_tokens": 3, "speculative.adaptive": False}


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 + 31 * seed + 13 * i + i * i) % VOCAB for i in range(length)]


class Told(Drafter):
    """Knows what greedy requests get, by their first token, and proposes that, with an error here and there."""

    name = "told"
    kinds: ClassVar[frozenset[str]] = ANY
    placement: ClassVar[str] = "device"
    graph_support: ClassVar[GraphSupport] = GraphSupport.UNIFORM
    answers: ClassVar[torch.Tensor] = torch.zeros((VOCAB, 1), dtype=torch.int64)
    wrong_every: ClassVar[int] = 0
    seen: ClassVar[list[str]] = []

    @classmethod
    def build(cls, env: DrafterEnv) -> Told:
        return cls()

    def propose(self, batch: DraftBatch) -> Drafts:
        self.seen.append("propose")
        return Drafts(np.full((len(batch.slots), 1), -1, dtype=np.int32))

    def draft(self, step: DraftRound) -> torch.Tensor:
        places = (step.starts + 2 + step.kept).unsqueeze(1) + torch.arange(step.num_drafts)
        text = self.answers[step.tokens[step.slots, 0].long()]
        ids = text.gather(1, places.clamp(max=text.shape[1] - 1))
        if self.wrong_every:
            ids = torch.where(places % self.wrong_every == 0, (ids + 1) % VOCAB, ids)
        return ids


class Illegal(Told):
    """Proposes what is no token, behind one that is."""

    name = "illegal"

    def draft(self, step: DraftRound) -> torch.Tensor:
        ids = super().draft(step)
        return torch.where(torch.arange(step.num_drafts) == 1, VOCAB + 5, ids)


class Broken(Told):
    """Cannot be recorded, though it says so."""

    name = "broken"

    def draft(self, step: DraftRound) -> torch.Tensor:
        raise RuntimeError("no")


class Following(Told):
    """Must see every token."""

    name = "following"
    needs: ClassVar[frozenset[str]] = frozenset({"last_hidden"})
    shown: ClassVar[list[int]] = []

    def draft(self, step: DraftRound) -> torch.Tensor:
        assert step.hidden.shape[:2] == (len(step.slots), step.num_drafts + 1)
        return super().draft(step)

    def follow(self, step: TargetStep) -> None:
        self.shown.extend(step.counts.tolist())


def parts_of(llm: LLM) -> Any:
    executor: Any = llm._core._executor
    return executor.worker._runner._parts


def replays(llm: LLM) -> tuple[int, int]:
    """Return how many verifications and decode steps were replayed."""
    parts = parts_of(llm)
    rounds = sum(one.verify.replays for one in parts.rounds._rounds.values())
    return rounds, sum(recorded.graph.replays for recorded in parts.graphs._recorded.values())


def tell(start: Start, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Let the drafter know what plain decoding gives, and return that."""
    outputs = [output.outputs[0].token_ids for output in start("cpu").generate(prompts, params)]
    Told.answers = torch.zeros((VOCAB, 96 + 8), dtype=torch.int64)
    for ids, answer in zip(prompts, outputs, strict=True):
        text = torch.tensor([*ids, *answer])
        Told.answers[ids[0], : len(text)] = text
    return [list(output) for output in outputs]


PROMPTS = [prompt(5, 0), prompt(17, 1), prompt(30, 2), prompt(9, 3), prompt(2, 4), prompt(50, 5), prompt(21, 6)]


@pytest.mark.parametrize("wrong_every", [0, 2, 5])
@pytest.mark.parametrize("overlapped", [False, True], ids=["plain loop", "overlap"])
@pytest.mark.parametrize("drafter", [Told, Illegal, Following])
def test_greedy_tokens_are_those_of_plain_decoding(
    start: Start, drafter: type[Told], overlapped: bool, wrong_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tell(start, PROMPTS)
    monkeypatch.setattr(Told, "wrong_every", wrong_every)
    llm = start(
        "recording", drafter, **{"speculative.method": drafter.name}, **SPECULATION, async_scheduling=overlapped
    )
    Told.seen.clear()
    before = replays(llm)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
    rounds, decodes = (after - was for after, was in zip(replays(llm), before, strict=True))
    # Where no drafts have room any more, at the ends, there are decode steps.
    assert rounds and decodes <= 4 and not Told.seen
    metrics = llm.get_metrics()
    kept = metrics.drafts_accepted / metrics.drafts_proposed
    assert kept == pytest.approx(1.0) if not wrong_every else 0 < kept < 1 or drafter is Illegal


def test_rounds_that_overlap_are_as_many_as_those_that_do_not(start: Start) -> None:
    (wanted,) = tell(start, [prompt(9)])
    told = {"speculative.method": "told", **SPECULATION}
    found = []
    for overlapped in (False, True):
        llm = start("recording", Told, **told, async_scheduling=overlapped)
        before = replays(llm)[0]
        (output,) = llm.generate([prompt(9)], GREEDY)
        assert list(output.outputs[0].token_ids) == wanted
        found.append(replays(llm)[0] - before)
    # One without drafts, then four tokens each; behind the end one round more may be under way.
    assert found[0] == 1 + -(-(COUNT - 2) // 4)
    assert found[0] <= found[1] <= found[0] + 3


@pytest.mark.parametrize("overlapped", [False, True], ids=["plain loop", "overlap"])
def test_requests_that_come_and_go_among_rounds(start: Start, overlapped: bool) -> None:
    prompts = [prompt(4 + 3 * seed, seed) for seed in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=3 + 2 * seed, ignore_eos=True) for seed in range(12)]
    longest = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    wanted = tell(start, prompts, longest)
    llm = start("recording", Told, **{"speculative.method": "told"}, **SPECULATION, async_scheduling=overlapped)
    names = []
    for ids, one in zip(prompts, params, strict=True):
        names.append(llm.enqueue({"prompt_token_ids": ids}, one))
        for _ in range(3):
            llm._advance()
    outputs = llm.wait_for_completion()
    for output, answer, one in zip(outputs, wanted, params, strict=True):
        assert list(output.outputs[0].token_ids) == answer[: one.max_tokens]


@pytest.mark.parametrize("overlapped", [False, True], ids=["plain loop", "overlap"])
def test_rounds_of_any_parameters_give_what_decoding_gives(start: Start, overlapped: bool) -> None:
    changes: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.0, "repetition_penalty": 1.4},
        {"temperature": 0.7, "top_k": 5, "seed": 5, "logprobs": 1},
        {"temperature": 0.0, "logit_bias": {3: 4.0}},
    ]
    params = [SamplingParams(max_tokens=14, ignore_eos=True, **change) for change in changes]
    prompts = PROMPTS[: len(params)]
    expected = start("cpu").generate(prompts, params)
    tell(start, prompts)
    llm = start("recording", Told, **{"speculative.method": "told"}, **SPECULATION, async_scheduling=overlapped)
    for ids, one, output in zip(prompts, params, expected, strict=True):
        (found,) = llm.generate([ids], one)
        assert found.outputs[0].token_ids == output.outputs[0].token_ids
        assert (found.outputs[0].logprobs is None) == (one.logprobs is None)
    for found, output in zip(llm.generate(prompts, params), expected, strict=True):
        assert found.outputs[0].token_ids == output.outputs[0].token_ids
        for mine, other in zip(found.outputs[0].logprobs or [], output.outputs[0].logprobs or [], strict=True):
            assert {i: e.logprob for i, e in mine.items()} == pytest.approx(
                {i: e.logprob for i, e in other.items()}, abs=1e-4
            )


def test_few_blocks_make_requests_wait_and_change_nothing(start: Start) -> None:
    wanted = tell(start, PROMPTS)
    llm = start("recording", Told, **{"speculative.method": "told"}, **SPECULATION, num_blocks=21)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
    assert llm.get_metrics().preemptions


def test_sequences_may_end_where_the_model_does(start: Start) -> None:
    ids = prompt(70, 8)
    params = SamplingParams(temperature=0, max_tokens=26, ignore_eos=True)
    wanted = tell(start, [ids], params)
    llm = start("recording", Told, **{"speculative.method": "told"}, **SPECULATION)
    assert [list(output.outputs[0].token_ids) for output in llm.generate([ids], params)] == wanted


def test_a_drafter_that_cannot_be_recorded_is_switched_off(start: Start) -> None:
    wanted = tell(start, PROMPTS[:2])
    llm = start("recording", Broken, **{"speculative.method": "broken"}, **SPECULATION)
    assert parts_of(llm).rounds is None
    outputs = llm.generate(PROMPTS[:2], GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted


def test_a_drafter_on_the_host_has_its_drafts_verified_in_recordings(start: Start) -> None:
    repeating = [[1, 2, 3, 4] * 5, [9, 8] * 7]
    expected = start("cpu").generate(repeating, GREEDY)
    llm = start("recording", **{"speculative.method": "suffix"}, **SPECULATION)
    assert not parts_of(llm).rounds.drafts
    before = replays(llm)[0]
    outputs = llm.generate(repeating, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert replays(llm)[0] > before


def test_prompt_lookup_is_recorded_too(start: Start) -> None:
    repeating = [[1, 2, 3, 4] * 5, [9, 8] * 7, prompt(13)]
    expected = start("cpu").generate(repeating, GREEDY)
    plain = start("cpu", **{"speculative.method": "ngram"}, **SPECULATION)
    plain.generate(repeating, GREEDY)
    llm = start("recording", **{"speculative.method": "ngram"}, **SPECULATION)
    assert parts_of(llm).rounds.drafts
    outputs = llm.generate(repeating, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert llm.get_metrics().drafts_accepted > 0


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_gives_what_plain_decoding_gives(start: Start, seed: int) -> None:
    """Requests of all kinds come at random times into few blocks, and some are aborted."""
    random = np.random.default_rng(seed)
    prompts = [prompt(int(random.integers(2, 40)), index) for index in range(14)]
    choices: list[dict[str, Any]] = [{"temperature": 0.0}] * 4 + [
        {"temperature": 0.8, "top_k": 9},
        {"temperature": 0.0, "frequency_penalty": 0.7},
    ]
    params = [
        SamplingParams(max_tokens=int(random.integers(1, 40)), ignore_eos=True, seed=index, **random.choice(choices))
        for index in range(14)
    ]
    expected = [list(o.outputs[0].token_ids) for o in start("cpu").generate(prompts, params)]
    tell(start, prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    drafter = Following if seed % 3 else Told
    settings = {**SPECULATION, "num_blocks": int(random.integers(14, 40)), "async_scheduling": bool(seed % 2)}
    settings |= {"speculative.method": drafter.name, "speculative.adaptive": seed == 3}
    llm = start("recording", drafter, **settings)
    before, aborted = replays(llm)[0], set()
    for index, (ids, one) in enumerate(zip(prompts, params, strict=True)):
        name = llm.enqueue({"prompt_token_ids": ids}, one)
        for _ in range(int(random.integers(0, 6))):
            llm._advance()
        if random.random() < 0.15:
            llm.abort(name)
            aborted.add(index)
    outputs = llm.wait_for_completion()
    found = {tuple(output.prompt_token_ids): list(output.outputs[0].token_ids) for output in outputs}
    assert replays(llm)[0] > before
    for index, (ids, answer) in enumerate(zip(prompts, expected, strict=True)):
        if index not in aborted:
            assert found[tuple(ids)] == answer, index


def test_more_sequences_than_are_recorded_draft_step_by_step(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield.worker.worker.ROUND_SIZES", (1, 2))
    repeating = [[seed, seed + 1, seed + 2] * 4 for seed in range(5)]
    expected = [o.outputs[0].token_ids for o in start("cpu").generate(repeating, GREEDY)]
    llm = start("recording", **{"speculative.method": "ngram"}, **SPECULATION)
    assert max(parts_of(llm).rounds.sizes) == 2
    assert [o.outputs[0].token_ids for o in llm.generate(repeating, GREEDY)] == expected
    many = llm.get_metrics()
    assert many.drafts_accepted > 0 and replays(llm)[0] > 0, "both ways were taken"
    adapting = start("recording", **{"speculative.method": "ngram", "speculative.num_speculative_tokens": 3})
    before = replays(adapting)
    assert [o.outputs[0].token_ids for o in adapting.generate(repeating, GREEDY)] == expected
    assert replays(adapting)[1] > before[1], "in larger batches there are ordinary steps"


@pytest.mark.parametrize("overlapped", [False, True], ids=["plain loop", "overlap"])
def test_a_model_that_is_watched_from_the_middle_of_an_answer_on(start: Start, overlapped: bool) -> None:
    wanted = tell(start, PROMPTS[:3])
    llm = start("recording", Told, **{"speculative.method": "told"}, **SPECULATION, async_scheduling=overlapped)
    for ids in PROMPTS[:3]:
        llm.enqueue({"prompt_token_ids": ids}, GREEDY)
    for _ in range(5):
        llm._advance()
    executor: Any = llm._core._executor
    executor.worker.watched_model()
    assert [list(output.outputs[0].token_ids) for output in llm.wait_for_completion()] == wanted


@pytest.mark.parametrize("overlapped", [False, True], ids=["plain loop", "overlap"])
def test_a_drafter_on_the_host_goes_on_where_rounds_end(start: Start, overlapped: bool) -> None:
    repeating = [[1, 2, 3, 4] * 5, [9, 8] * 7, prompt(13), prompt(11, 2)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = [list(o.outputs[0].token_ids) for o in start("cpu").generate(repeating, params)]
    llm = start("recording", **{"speculative.method": "ngram"}, **SPECULATION, async_scheduling=overlapped)
    for ids in repeating[:3]:
        llm.enqueue({"prompt_token_ids": ids}, params)
    for _ in range(9):
        llm._advance()
    executor: Any = llm._core._executor
    executor.worker.watched_model()
    # Rounds that were planned ahead go on until something else comes.
    llm.enqueue({"prompt_token_ids": repeating[3]}, params)
    drafter = executor.worker._runner._speculation.drafter
    propose, read = drafter.propose, []

    def reading(batch: DraftBatch) -> Drafts:
        assert batch.token_ids is not None and not batch.token_ids.flags.writeable
        for slot, length in zip(batch.slots.tolist(), batch.lengths.tolist(), strict=True):
            read.append(batch.token_ids[slot, :length].tolist())
        return propose(batch)

    drafter.propose = reading
    assert [list(output.outputs[0].token_ids) for output in llm.wait_for_completion()] == expected
    texts = [[*ids, *answer] for ids, answer in zip(repeating, expected, strict=True)]
    assert len(read) > 9 and all(any(text[: len(one)] == one for text in texts) for one in read)
