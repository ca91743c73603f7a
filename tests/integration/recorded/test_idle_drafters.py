"""A drafter that is loaded and idle: a decode step does what it does where there is none."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch
from recording_platform import Graph

from jackfield import LLM, SamplingParams
from jackfield.interfaces import DraftRound
from jackfield.worker.transfer import Transfer
from recorded.conftest import Start
from recorded.test_recorded_rounds import Following, Told, parts_of, prompt, replays

COUNT, SEQUENCES = 40, 6
MORE_CALLS = 18
"""Most calls of functions that an idle drafter may add to a step; they take a microsecond or less each, where a step of
256 sequences takes a thousand or two.
"""
PARAMS = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)


class Tapping(Following):
    """Looks at what layers give, too."""

    name = "tapping"
    needs: ClassVar[frozenset[str]] = frozenset({"last_hidden", "taps"})
    taps = (0, 1)

    def draft(self, step: DraftRound) -> torch.Tensor:
        assert [tap.shape for tap in step.taps] == [step.hidden.shape] * 2
        return super().draft(step)


def recorded_ops(llm: LLM) -> list[int]:
    """Return how many ops were recorded of each size of decode steps."""
    return [len(recorded.graph.calls) for _, recorded in sorted(parts_of(llm).graphs._recorded.items())]


def moved(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that fills with the transfers of an engine's steps."""
    seen: list[str] = []
    for name in ("send", "fetch"):
        inner = getattr(Transfer, name)

        def counted(self: Transfer, what: Any, name: str = name, inner: Any = inner) -> Any:
            if self is parts_of(llm).transfer:
                seen.append(name)
            return inner(self, what)

        monkeypatch.setattr(Transfer, name, counted)
    return seen


def steady(llm: LLM) -> None:
    """Bring an engine to the middle of many answers."""
    for seed in range(SEQUENCES):
        llm.enqueue({"prompt_token_ids": prompt(6, seed)}, PARAMS)
    for _ in range(20):
        llm._advance()


def work_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], tuple[int, int], int]:
    """Return the transfers of ten steps, rounds and decode steps that were replayed, and how much the drafter was
    shown.
    """
    steady(llm)
    before, shown = replays_of(llm), len(Following.shown)
    with monkeypatch.context() as patched:
        seen = moved(llm, patched)
        for _ in range(10):
            llm._advance()
    rounds, decodes = (after - was for after, was in zip(replays_of(llm), before, strict=True))
    llm.wait_for_completion()
    return seen, (rounds, decodes), len(Following.shown) - shown


def calls_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many functions ten steps call on the host, but for the device's work."""
    steady(llm)
    calls = 0

    def counted(frame: FrameType, event: str, what: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with monkeypatch.context() as patched:
        patched.setattr(Graph, "replay", lambda self: None)
        sys.setprofile(counted)
        for _ in range(10):
            llm._advance()
        sys.setprofile(None)
    llm.wait_for_completion()
    return calls


def replays_of(llm: LLM) -> tuple[int, int]:
    """Return replays of rounds and of decode steps; there are no rounds without a drafter."""
    if parts_of(llm).rounds is not None:
        return replays(llm)
    return 0, sum(recorded.graph.replays for recorded in parts_of(llm).graphs._recorded.values())


@pytest.fixture(params=[Tapping, Following, Told], ids=lambda drafter: drafter.name)
def engines(start: Start, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[LLM, LLM]:
    """Return an engine without a drafter, and one whose drafter is idle in steps of more than two sequences."""
    monkeypatch.setattr("jackfield.worker.worker.ROUND_SIZES", (1, 2))
    speculative = {"speculative.method": request.param.name, "speculative.num_speculative_tokens": 3}
    plain, idle = start("recording"), start("recording", request.param, **speculative)
    assert max(parts_of(idle).rounds.sizes) < SEQUENCES
    return plain, idle


def test_an_idle_drafter_adds_no_launch_and_no_transfer(
    engines: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, idle = engines
    assert recorded_ops(idle) == recorded_ops(plain)
    wanted = work_of(plain, monkeypatch)
    assert wanted[1] == (0, 10) and len(wanted[0]) >= 20
    assert work_of(idle, monkeypatch) == wanted


def test_an_idle_drafter_costs_the_host_next_to_nothing(
    engines: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, idle = (calls_of(llm, monkeypatch) for llm in engines)
    assert plain > 1000
    assert (idle - plain) / 10 <= MORE_CALLS
