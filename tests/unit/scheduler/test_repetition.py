"""Outputs that repeat themselves end: the detector against brute force, and the scheduler with it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import Setup, request

from jackfield.errors import RequestError
from jackfield.protocol import (
    CoreEvent,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    RepetitionDetection,
    SamplerOutput,
    SamplingParams,
)
from jackfield.scheduler import Scheduler
from jackfield.scheduler.ends import repeats


def brute(output: list[int], shortest: int, longest: int, count: int) -> bool:
    """Return whether the output is something followed by ``count`` copies of a pattern."""
    patterns = (output[len(output) - size :] for size in range(max(1, shortest), longest + 1) if size <= len(output))
    return any(output[max(0, len(output) - len(p) * count) :] == p * count for p in patterns)


@given(st.lists(st.integers(0, 2), max_size=24), st.integers(0, 6), st.integers(0, 6), st.integers(2, 5))
def test_the_detector_equals_brute_force(output: list[int], one: int, other: int, count: int) -> None:
    shortest, longest = min(one, other), max(one, other)
    wish = RepetitionDetection(max_pattern_size=longest, min_pattern_size=shortest, min_count=count)
    assert repeats(np.array(output, dtype=np.int32), wish) == brute(output, shortest, longest, count)


def asking(
    name: str, prompt: list[int], wish: RepetitionDetection | None, max_tokens: int = 40, **values: object
) -> EngineCoreRequest:
    made = request(name, prompt, max_tokens, **values)
    made.sampling_params.repetition_detection = wish
    return made


def run(asked: list[EngineCoreRequest], outputs: dict[str, list[int]], **sizes: object) -> dict[str, list[CoreEvent]]:
    """Run requests whose tokens are given, with as many drafts accepted as the setup allows; returns their events."""
    setup = Setup(**sizes)  # type: ignore[arg-type]
    scheduler: Scheduler = setup.scheduler()
    names: dict[int, str] = {}
    told: dict[str, list[CoreEvent]] = {r.request_id: [] for r in asked}
    done = dict.fromkeys(told, 0)
    for one in asked:
        scheduler.add(one)
    while scheduler.has_work():
        plan = scheduler.schedule()
        names.update({new.slot: new.request_id for new in plan.new})
        rows = plan.slots[plan.samples].tolist()
        width = 1 + setup.num_drafts
        tokens = np.full((len(rows), width), -1, dtype=np.int32)
        following = np.full((len(rows), setup.num_drafts), -1, dtype=np.int32)
        drafts = plan.num_drafts[plan.samples] if plan.num_drafts is not None else np.zeros(len(rows), dtype=int)
        for row, slot in enumerate(rows):
            name = names[slot]
            count = 1 + int(drafts[row])
            tokens[row, :count] = outputs[name][done[name] : done[name] + count]
            done[name] += count
            ahead = outputs[name][done[name] : done[name] + setup.num_drafts]
            following[row, : len(ahead)] = ahead
        result = ModelRunnerOutput(plan.step_id, SamplerOutput(tokens), following if setup.num_drafts else None)
        for event in scheduler.update(plan, result).events:
            told[event.request_id].append(event)
    scheduler.check_idle()
    return told


def expected(output: list[int], wish: RepetitionDetection, min_tokens: int = 0) -> int:
    """Return how many tokens come out."""
    for count in range(max(1, min_tokens), len(output)):
        if brute(output[:count], wish.min_pattern_size, wish.max_pattern_size, wish.min_count):
            return count
    return len(output)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("seed", range(6))
def test_a_request_ends_where_its_output_first_repeats(seed: int, num_drafts: int) -> None:
    rng = random.Random(seed)
    wish = RepetitionDetection(max_pattern_size=3, min_pattern_size=2, min_count=3)
    outputs = {name: [*rng.choices(range(2), k=28), *[1, 0, 0] * 3, 1, 0, 0] for name in "abc"}
    floor = 20 if seed % 2 else 0
    asked = [asking("a", [1, 1, 1], wish, min_tokens=floor), asking("b", [0], None), asking("c", [0, 1] * 8, wish)]
    told = run(asked, outputs, num_drafts=num_drafts, max_model_len=64)
    lengths = {"a": expected(outputs["a"], wish, floor), "b": 40, "c": expected(outputs["c"], wish)}
    for name, events in told.items():
        tokens = [token for event in events for token in event.token_ids]
        assert tokens == outputs[name][: lengths[name]]
        wanted = (FinishReason.LENGTH, None) if lengths[name] == 40 else (FinishReason.STOP, "repetition")
        assert (events[-1].finish, events[-1].stop_reason) == wanted
    assert lengths["a"] < 40 and lengths["c"] < 40, "the case shows something"


def test_the_prompt_is_no_part_of_the_pattern() -> None:
    wish = RepetitionDetection(max_pattern_size=1, min_count=3)
    told = run([asking("a", [7, 7, 7, 7], wish, 4)], {"a": [7, 7, 5, 5]})
    assert told["a"][-1].finish is FinishReason.LENGTH


def test_a_stop_id_and_the_length_come_first() -> None:
    wish = RepetitionDetection(max_pattern_size=1, min_count=2)
    by_id = run([asking("a", [1], wish, stop_token_ids=[3])], {"a": [3, 3]})
    assert (by_id["a"][-1].finish, by_id["a"][-1].stop_reason) == (FinishReason.STOP, 3)
    by_length = run([asking("a", [1], wish, 2)], {"a": [4, 4]})
    assert (by_length["a"][-1].finish, by_length["a"][-1].stop_reason) == (FinishReason.LENGTH, None)


def test_detection_survives_preemption() -> None:
    wish = RepetitionDetection(max_pattern_size=2, min_pattern_size=2, min_count=4)
    outputs = {name: [*range(10, 26), 1, 2, 1, 2, 1, 2, 1, 2, *range(30, 46)] for name in "abcd"}
    asked = [asking(name, [1, 2, 3], wish, 40) for name in "abcd"]
    told = run(asked, outputs, block_size=2, spare=2, max_model_len=48)
    for events in told.values():
        assert [token for event in events for token in event.token_ids] == outputs["a"][:24]
        assert events[-1].stop_reason == "repetition"


@pytest.mark.parametrize(
    ("values", "field", "rule"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size", "from 0 to 4096"),
        ({"max_pattern_size": 3, "min_pattern_size": 4}, "min_pattern_size", "from 0 to 3"),
        ({"max_pattern_size": 3, "min_count": 1}, "min_count", "from 2 to 4096"),
        ({"max_pattern_size": True}, "max_pattern_size", "from 0 to 4096"),
    ],
)
def test_values_out_of_range_are_errors(values: dict[str, int], field: str, rule: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(repetition_detection=values)  # type: ignore[arg-type]
    assert caught.value.message == f"{field} must be a whole number {rule}"
    assert caught.value.field == f"sampling_params.repetition_detection.{field}"
    assert caught.value.value == values[field]


def test_malformed_maps_are_errors() -> None:
    with pytest.raises(RequestError, match=r"^repetition_detection is malformed: .*max_pattern.*"):
        SamplingParams(repetition_detection={"max_pattern": 3})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^repetition_detection must be a RepetitionDetection or a map"):
        SamplingParams(repetition_detection=3)  # type: ignore[arg-type]
