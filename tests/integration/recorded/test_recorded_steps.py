"""Steps that are replayed give what steps give that are launched op by op."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest
from recording_platform import Graphs

from jackfield import LLM, SamplingParams
from jackfield.interfaces import ANY, DraftBatch, Drafter, DrafterEnv, Drafts, TargetStep
from recorded.conftest import DECODE_SIZES, SETTINGS, TOKEN_SIZES, VOCAB, Start

EXACT_AND_ABOVE = (1, 7, 8, 9, 16, 17, 24, 25, 39, 40, 41, 47, 48, 49, 60)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 + 31 * seed + 13 * i + i * i) % VOCAB for i in range(length)]


def parameters(index: int) -> SamplingParams:
    """Return parameters that differ from request to request: greedy, sampled, edited, scored."""
    changes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.1, "top_k": 7, "logprobs": 0},
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"temperature": 0.7, "repetition_penalty": 1.3, "min_p": 0.05},
        {"temperature": 0.0, "logit_bias": {3: 2.5}, "frequency_penalty": 0.4, "logprobs": 1},
    ]
    return SamplingParams(max_tokens=4 + index % 9, seed=index, ignore_eos=True, **changes[index % len(changes)])


def graphs_of(llm: LLM) -> Graphs:
    executor: Any = llm._core._executor
    graphs: Graphs = executor.worker._platform.graphs
    return graphs


def parts_of(llm: LLM) -> Any:
    executor: Any = llm._core._executor
    return executor.worker._runner._parts


def scores(output: Any) -> list[Any]:
    """Return everything that was scored: prompt tokens and output tokens, by token."""
    maps = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    return [{token: entry.logprob for token, entry in found.items()} for found in maps]


def assert_same(outputs: Any, expected: Any) -> None:
    for one, other in zip(outputs, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        found, wanted = scores(one), scores(other)
        assert [set(part) for part in found] == [set(part) for part in wanted]
        assert found == [pytest.approx(part, abs=1e-4) for part in wanted]


def staggered(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> Any:
    """Return outputs of requests that come in one after another, two steps apart."""
    for ids, one in zip(prompts, params, strict=True):
        llm.enqueue({"prompt_token_ids": ids}, one)
        for _ in range(2):
            llm._advance()
    return llm.wait_for_completion()


@pytest.mark.parametrize("attention", ["plain", "preparing"])
@pytest.mark.parametrize("overlapped", [False, True], ids=["plain loop", "overlap"])
def test_a_mixed_workload_equals_single_requests_on_the_plain_platform(
    start: Start, attention: str, overlapped: bool
) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate(EXACT_AND_ABOVE)]
    params = [parameters(index) for index in range(len(prompts))]
    reference = start("cpu", attention="torch_sdpa")
    expected = [reference.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
    llm = start(attention=attention, async_scheduling=overlapped)
    assert_same(llm.generate(prompts, params), expected)
    assert_same(staggered(llm, prompts, params), expected)
    parts = parts_of(llm)
    decodes = {size: recorded.graph.replays for size, recorded in parts.graphs._recorded.items()}
    assert sorted(decodes) == [*DECODE_SIZES, SETTINGS["max_num_seqs"]]
    assert any(decodes.values())
    assert all(pieces.graphs[0].replays for pieces in parts.pieces._recorded.values()), "every size was met"


@pytest.mark.parametrize("length", EXACT_AND_ABOVE)
def test_a_prompt_is_replayed_at_the_next_recorded_size(start: Start, length: int) -> None:
    llm = start(async_scheduling=False, long_prefill_token_threshold=48)
    pieces = parts_of(llm).pieces
    before = {size: p.graphs[0].replays for size, p in pieces._recorded.items()}
    output = llm.generate([prompt(length)], SamplingParams(temperature=0, max_tokens=1))[0]
    after = {size: p.graphs[0].replays for size, p in pieces._recorded.items()}
    chunks = [min(48, length - at) for at in range(0, length, 48)]
    fitting = [min((s for s in TOKEN_SIZES if s >= chunk), default=None) for chunk in chunks]
    # A step in which every sequence has one token is a decode step, whatever it is the start of.
    wanted = {size: fitting.count(size) if length > 1 else 0 for size in TOKEN_SIZES}
    wanted_last = wanted if not (length % 48 == 1 and length > 1) else {**wanted, 8: 0}
    assert {size: after[size] - before[size] for size in TOKEN_SIZES} == wanted_last
    alone = start("cpu").generate([prompt(length)], SamplingParams(temperature=0, max_tokens=1))[0]
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)])
def test_a_batch_is_replayed_at_the_next_recorded_size(start: Start, count: int, size: int) -> None:
    llm = start(async_scheduling=False)
    recorded = parts_of(llm).graphs._recorded
    before = {s: r.graph.replays for s, r in recorded.items()}
    prompts = [prompt(5, seed) for seed in range(count)]
    outputs = llm.generate(prompts, GREEDY)
    after = {s: r.graph.replays for s, r in recorded.items()}
    assert {s: after[s] - before[s] for s in recorded if after[s] != before[s]} == {size: 5}
    expected = start("cpu").generate(prompts, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]


def test_padding_rows_touch_only_the_null_block_and_the_padding_slot(start: Start) -> None:
    llm = start(async_scheduling=False)
    parts, scheduler = parts_of(llm), llm._core.scheduler
    for seed in range(5):
        llm.enqueue({"prompt_token_ids": prompt(5 + 4 * seed, seed)}, GREEDY)
    for _ in range(3):
        llm._advance()
    parts.batch.tokens[5:, 1] = -7  # unused slots, and the padding slot behind them
    caches = {layer: {name: plane.clone() for name, plane in planes.items()} for layer, planes in parts.caches.items()}
    tokens = parts.batch.tokens.clone()
    running = list(scheduler._running)
    places = {slot: int(scheduler._table.computed[slot]) for slot in running}
    cells = {(scheduler.cache.table(slot, 0)[at // 8], at % 8) for slot, at in places.items()}
    replays = parts.graphs._recorded[6].graph.replays
    llm._advance()
    assert parts.graphs._recorded[6].graph.replays == replays + 1, "five rows were padded to six"
    for layer, planes in parts.caches.items():
        for name, plane in planes.items():
            changed = (plane != caches[layer][name]).flatten(2).any(-1).nonzero().tolist()
            assert cells <= {tuple(cell) for cell in changed} <= cells | {(0, 0)}
    written = {tuple(cell) for cell in (parts.batch.tokens != tokens).nonzero().tolist()}
    assert written == {(slot, at + 1) for slot, at in places.items()} | {(parts.batch.padding_slot, 1)}
    llm.wait_for_completion()


def test_nothing_of_the_warm_up_is_left(start: Start) -> None:
    llm = start()
    parts, state = parts_of(llm), parts_of(llm).state
    assert graphs_of(llm).replays > 0, "the warm-up replayed"
    assert not state.extras and not state.edits.any() and state.greedy.all()
    assert (state.logprobs == -2).all() and (state.prompt_logprobs == -2).all()
    padding = parts.batch.padding_slot
    assert int(parts.batch.tokens[padding, 0]) == 0
    assert all(int(table[padding].abs().max()) == 0 for table in parts.batch._tables)
    llm._core.scheduler.check_idle()
    expected = start("cpu").generate([prompt(60)], parameters(1))[0]
    assert_same(llm.generate([prompt(60)], parameters(1)), [expected])


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 2, "max_num_batched_tokens": 4},
        {"max_num_batched_tokens": 8, "max_num_seqs": 6},
        {"max_model_len": 8, "max_num_seqs": 3},
        {"num_blocks": 13, "block_size": 8},
        {"block_size": 64, "num_blocks": 3},
    ],
)
def test_small_engines_start_and_answer(start: Start, changes: dict[str, Any]) -> None:
    prompts = [prompt(4, seed) for seed in range(5)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected = start("cpu").generate(prompts, params)
    assert_same(start(**changes).generate(prompts, params), expected)


@pytest.mark.parametrize("attention", ["exact", "unable", "torch_sdpa"])
def test_backends_that_cannot_be_recorded_never_are(start: Start, attention: str) -> None:
    llm = start(attention=attention)
    assert not graphs_of(llm).all
    assert parts_of(llm).graphs is None and parts_of(llm).pieces is None
    prompts = [prompt(length) for length in (3, 20)]
    assert_same(llm.generate(prompts, GREEDY), start("cpu").generate(prompts, GREEDY))


def test_every_result_is_waited_for(start: Start) -> None:
    llm = start()
    executor: Any = llm._core._executor
    streams = executor.worker._platform.streams
    llm.generate([prompt(30), prompt(9)], GREEDY)
    while llm._core.has_work():
        llm._advance()
    launched = streams.recorded - (llm._core._in_flight is not None)
    assert streams.waited == list(range(1, launched + 1))


def test_builders_get_bounds_of_lengths_in_recordings(start: Start) -> None:
    llm = start()
    builder = parts_of(llm).builders["full"]
    built = builder.built
    llm.generate([prompt(5)], GREEDY)
    assert built >= len(DECODE_SIZES) + 1, "every recorded size was built once and more"
    assert builder.built - built < 6, "replayed decode steps build nothing"


class Watching(Drafter):
    """Proposes nothing, and counts the tokens that it is shown of each slot."""

    name = "watching"
    kinds: ClassVar[frozenset[str]] = ANY
    shown: ClassVar[Counter[int]] = Counter()

    @classmethod
    def build(cls, env: DrafterEnv) -> Watching:
        return cls()

    def propose(self, batch: DraftBatch) -> Drafts:
        return Drafts(np.full((len(batch.slots), 1), -1, dtype=np.int32))

    def follow(self, step: TargetStep) -> None:
        for slot, count in zip(step.slots.tolist(), step.counts.tolist(), strict=True):
            self.shown[slot] += count


class Featured(Watching):
    """The same, where it needs what recorded steps do not show."""

    name = "featured"
    needs: ClassVar[frozenset[str]] = frozenset({"last_hidden"})


def decodes(llm: LLM) -> int:
    """Return how many steps of single tokens were replayed; none where none are recorded."""
    graphs = parts_of(llm).graphs
    return 0 if graphs is None else sum(recorded.graph.replays for recorded in graphs._recorded.values())


@pytest.mark.parametrize("drafter", [Watching, Featured])
def test_a_drafter_that_needs_hidden_states_sees_every_token(start: Start, drafter: type[Watching]) -> None:
    llm = start("recording", drafter, **{"speculative.method": drafter.name})
    Watching.shown.clear()  # of what warming up showed
    before = decodes(llm)
    (output,) = llm.generate([prompt(9)], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 30
    # Every token but the first is behind a step without drafts: the drafter, which could bring some, brings none.
    assert decodes(llm) - before == (29 if drafter is Watching else 0)
    # The last token is sampled and never read.
    assert (sum(Watching.shown.values()) == 9 + 29) == (drafter is Featured)
