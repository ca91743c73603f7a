"""What one row does never depends on another; extremes; edits against scalar references; log probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_world import World, params, penalized, softmax

from jackfield.protocol import SamplingParams

VOCAB = 12

some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.2]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
)
# Multiples of a half: like logits of narrow types, they hold many ties.
some_logits = st.lists(st.integers(-4, 4).map(lambda x: x / 2), min_size=VOCAB, max_size=VOCAB)


def test_greedy_takes_the_largest_logit() -> None:
    world = World(2)
    world.add(0, params(temperature=0))
    world.add(1, params(temperature=9e-6, top_k=5, top_p=0.1))
    assert world.sample(torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 1.0]]), [0, 1]) == [1, 0]


@settings(max_examples=80, deadline=None)
@given(data=st.data(), count=st.integers(2, 6))
def test_batch_mates_and_order_change_nothing(data: st.DataObject, count: int) -> None:
    rows = [(data.draw(some_params), data.draw(some_logits), data.draw(st.integers(0, 2**40))) for _ in range(count)]
    order = data.draw(st.permutations(range(count)))
    together = World(count)
    for slot, (values, _, seed) in enumerate(rows):
        together.add(slot, values, seed=seed, prompt=[1, 2], output=[3])
    logits = torch.tensor([rows[slot][1] for slot in order])
    mixed = dict(zip(order, together.sample(logits, order), strict=True))
    for slot, (values, own, seed) in enumerate(rows):
        alone = World(1)
        alone.add(0, values, seed=seed, prompt=[1, 2], output=[3])
        assert alone.sample(torch.tensor([own]), [0]) == [mixed[slot]]


def test_ties_at_the_border_of_top_k_do_not_depend_on_batch_mates() -> None:
    vocab = 5000
    logits = torch.from_numpy(np.random.default_rng(1).integers(0, 4, (1, vocab))).float()
    alone, beside = World(1), World(2)
    alone.add(0, params(top_k=20), seed=5)
    beside.add(0, params(top_k=20), seed=5)
    beside.add(1, params(top_k=700), seed=6)
    positions = list(range(300))
    expected = alone.sample(logits.expand(300, -1), [0] * 300, positions)
    slots = [0, 1] * 300
    twice = [p for p in positions for _ in range(2)]
    assert beside.sample(logits.expand(600, -1), slots, twice)[::2] == expected
    first_of_the_best = torch.nonzero(logits[0] == 3).flatten()[:20].tolist()
    assert set(expected) <= set(first_of_the_best), "of equal logits the smaller ids are kept"


def test_the_same_seed_repeats_and_another_differs() -> None:
    logits = torch.zeros(1, 1000).expand(64, -1)
    runs = []
    for seed in (3, 3, 4):
        world = World(1)
        world.add(0, params(), seed=seed)
        runs.append(world.sample(logits, [0] * 64, list(range(64))))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_slot_that_is_released_keeps_nothing() -> None:
    world = World(1)
    world.add(0, params(allowed_token_ids=[1], logprobs=2))
    world.state.release(0)
    world.add(0, params(temperature=0))
    rows = world.rows([0])
    assert world.sampler.sample(torch.tensor([[5.0, 1.0]]), rows)[0].tolist() == [0]
    assert world.sampler.logprobs(torch.tensor([[5.0, 1.0]]), torch.tensor([0]), rows.slots) is None


def test_a_tiny_temperature_takes_the_best_and_draws_among_equals() -> None:
    world = World(1)
    world.add(0, params(temperature=1e-4))
    ids = world.sample(torch.tensor([1.0, 3.0, 3.0, 2.9]).expand(2000, -1), [0] * 2000, list(range(2000)))
    assert set(ids) == {1, 2}
    assert 850 < ids.count(1) < 1150


@pytest.mark.parametrize("temperature", [2e6, 3e38])
def test_a_huge_temperature_is_a_uniform_draw(temperature: float) -> None:
    world = World(1)
    world.add(0, params(temperature=temperature, allowed_token_ids=[0, 1, 3]))
    ids = world.sample(torch.tensor([90.0, -90.0, 0.0, 1.0]).expand(3000, -1), [0] * 3000, list(range(3000)))
    counts = np.bincount(ids, minlength=4)
    assert counts[2] == 0
    assert bool((abs(counts[[0, 1, 3]] - 1000) < 120).all())


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.floats(-5, 5, width=32), min_size=VOCAB, max_size=VOCAB),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.25, 4.0),
)
def test_penalties_equal_the_scalar_rule(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    presence: float,
    frequency: float,
    repetition: float,
) -> None:
    values = params(
        temperature=0, presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition
    )
    world = World(1)
    world.add(0, values, prompt=prompt, output=output)
    before = torch.tensor([logits])
    _, edited = world.sampler.sample(before, world.rows([0]))
    assert torch.equal(before, torch.tensor([logits])), "the model's own logits stay as they are"
    expected = penalized(logits, values, prompt, output)
    assert torch.allclose(edited[0], torch.tensor(expected), atol=1e-4)


def edited(values: SamplingParams, logits: list[float], **kept: object) -> list[float]:
    world = World(1)
    world.add(0, values, **kept)  # type: ignore[arg-type]
    _, found = world.sampler.sample(torch.tensor([logits]), world.rows([0]))
    row: list[float] = found[0].tolist()
    return row


def test_a_bias_is_added() -> None:
    assert edited(params(temperature=0, logit_bias={1: 2.5, 2: -100.0}), [1.0, 1.0, 1.0]) == [1.0, 3.5, -99.0]


def test_only_allowed_ids_stay() -> None:
    assert edited(params(temperature=0, allowed_token_ids=[2, 0]), [1.0, 9.0, 3.0]) == [1.0, -math.inf, 3.0]


@pytest.mark.parametrize(
    ("output", "banned"), [([], {4}), ([2], {3, 4}), ([1, 2], {3, 4, 5}), ([2, 1], {4}), ([9, 1, 2], {3, 4, 5})]
)
def test_bad_words_are_never_completed(output: list[int], banned: set[int]) -> None:
    bad = [[4], [2, 3], [1, 2, 5]]
    row = edited(params(temperature=0), [0.0] * 10, prompt=[1, 2], output=output, bad_words=bad)
    assert {token for token, value in enumerate(row) if value == -math.inf} == banned


@pytest.mark.parametrize(("done", "hidden"), [(0, True), (2, True), (3, False)])
def test_min_tokens_hides_end_ids_until_enough(done: int, hidden: bool) -> None:
    values = params(temperature=0, min_tokens=3)
    row = edited(values, [0.0] * 6, prompt=[0, 0, 0], output=[1] * done, stop_ids=[2, 5])
    assert {token for token, value in enumerate(row) if value == -math.inf} == ({2, 5} if hidden else set())


def test_drafts_before_a_row_count_as_its_output() -> None:
    """Rows behind drafts have longer histories than the sequence."""
    world = World(1)
    world.add(0, params(temperature=0, min_tokens=2), prompt=[0], output=[3, 4], stop_ids=[1])
    logits = torch.tensor([[0.0, 9.0, 1.0]]).repeat(2, 1)
    assert world.sample(logits, [0, 0], [2, 3]) == [2, 1]


def test_edits_of_one_row_leave_the_others_alone() -> None:
    world = World(2)
    world.add(0, params(temperature=0, allowed_token_ids=[1]))
    world.add(1, params(temperature=0))
    logits = torch.tensor([[5.0, 1.0], [5.0, 1.0]])
    ids, found = world.sampler.sample(logits, world.rows([0, 1]))
    assert ids.tolist() == [1, 0]
    assert found[1].tolist() == [5.0, 1.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_left_still_gives_an_id(temperature: float) -> None:
    world = World(1)
    world.add(0, params(temperature=temperature, allowed_token_ids=[1]), bad_words=[[1]])
    (token,) = world.sample(torch.zeros(1, 4), [0])
    assert 0 <= token < 4


def test_logprobs_are_those_of_the_model() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]]).repeat(4, 1)
    world = World(4)
    for slot, wanted in enumerate([2, None, 0, -1]):
        world.add(slot, params(logprobs=wanted, temperature=0.3, top_k=1))
    found = world.sampler.logprobs(logits, torch.tensor([2, 1, 1, 3]), np.arange(4, dtype=np.int32))
    assert found is not None
    exact = np.log(softmax([1.0, 3.0, 2.0, -1.0]))
    expected = [(2, [1, 2], 2), None, (1, [], 1), (3, [1, 2, 0, 3], 4)]
    for item, want in zip(found, expected, strict=True):
        if want is None:
            assert item is None
            continue
        assert item is not None
        chosen, best, rank = want
        assert (item.token_ids, item.rank) == ([chosen, *best], rank)
        assert item.values == pytest.approx([exact[t] for t in item.token_ids], abs=1e-6)


def test_no_logprobs_where_nobody_asks() -> None:
    world = World(1)
    world.add(0, params())
    assert world.sampler.logprobs(torch.zeros(1, 3), torch.tensor([0]), np.zeros(1, dtype=np.int32)) is None


@pytest.mark.parametrize("values", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_a_row_of_nan_does_not_disturb_the_others(values: dict[str, float]) -> None:
    world = World(2)
    world.add(0, params(**values))
    world.add(1, params(**values))
    ids = world.sample(torch.tensor([[math.nan] * 4, [50.0, 0.0, 0.0, 0.0]]), [0, 1])
    assert 0 <= ids[0] < 4 and ids[1] == 0


def test_penalties_of_many_rows_are_those_of_each() -> None:
    generator = np.random.default_rng(4)
    count = 150
    world = World(count, length=40)
    kept = []
    for slot in range(count):
        prompt = generator.integers(0, VOCAB, generator.integers(1, 20)).tolist()
        output = generator.integers(0, VOCAB, generator.integers(0, 18)).tolist()
        values = params(temperature=0.0)
        if slot % 3:
            rates = generator.uniform(-2, 2, 2).tolist()
            values = params(
                temperature=0.0,
                repetition_penalty=float(generator.uniform(0.5, 2.0)),
                frequency_penalty=rates[0],
                presence_penalty=rates[1],
            )
        world.add(slot, values, prompt=prompt, output=output)
        kept.append((values, prompt, output))
    logits = torch.from_numpy(generator.normal(size=(count, VOCAB)).astype(np.float32))
    _, found = world.sampler.sample(logits, world.rows(list(range(count))))
    wanted = [penalized(logits[i].tolist(), *kept[i]) for i in range(count)]
    torch.testing.assert_close(found, torch.tensor(np.array(wanted), dtype=torch.float32), atol=1e-4, rtol=0)
