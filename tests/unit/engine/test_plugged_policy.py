"""Scheduling policies are plugins: chosen by name, an order and nothing more."""

from __future__ import annotations

import math
from typing import Any

import pytest
from engine_world import drain, greedy, prompt, start

from jackfield.errors import ConfigError
from jackfield.interfaces import Option, RequestView, SchedulingPolicy, Settings


class ShortestFirst(SchedulingPolicy):
    """Short prompts first; or long ones, as its option says."""

    name = "shortest_first"
    options = {"sign": Option(int, 1)}

    def __init__(self, sign: int) -> None:
        self._sign = sign

    @classmethod
    def build(cls, settings: Settings) -> ShortestFirst:
        return cls(settings["sign"])

    def key(self, request: RequestView) -> tuple[float, ...]:
        return (self._sign * request.prompt_length, request.arrival)


class Broken(SchedulingPolicy):
    """Gives a bad key to requests that ask for it."""

    name = "broken"

    def key(self, request: RequestView) -> Any:
        keys: dict[str, Any] = {"nan": (math.nan,), "text": ("a",), "number": 1}
        kind = request.extra_args.get("key")
        if kind == "raise":
            raise RuntimeError("no key")
        return keys.get(kind, (request.arrival,)) if kind else (request.arrival,)


def order(model: str, lengths: list[int], **settings: Any) -> list[int]:
    """Return prompt lengths in the order in which requests end when only one runs at a time."""
    llm = start(model, max_num_seqs=1, plugins=[ShortestFirst], **settings)
    for seed, length in enumerate(lengths):
        llm.enqueue(prompt(seed, length), greedy(2))
    ended: list[int] = []
    while llm._core.has_work():
        ended += [len(llm._done[name].prompt_token_ids) for name in llm._advance()]
    drain(llm)
    return ended


LENGTHS = [30, 5, 17, 9, 21]


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_third_party_policy_orders_requests(model: str, overlapped: bool) -> None:
    settings = {"policy": "shortest_first", "async_scheduling": overlapped}
    assert order(model, LENGTHS, **settings) == sorted(LENGTHS)


def test_a_policy_gets_its_options(model: str) -> None:
    options = {"options": {"shortest_first": {"sign": -1}}}
    assert order(model, LENGTHS, policy="shortest_first", **{"plugins.options": options["options"]}) == sorted(
        LENGTHS, reverse=True
    )


def test_a_policy_that_nobody_names_changes_nothing(model: str) -> None:
    assert order(model, LENGTHS) == LENGTHS


def test_the_report_says_who_orders_requests(model: str) -> None:
    llm = start(model, policy="shortest_first", plugins=[ShortestFirst])
    (decision,) = (d for d in llm.report.decisions if d.family == "scheduling_policies")
    assert (decision.name, decision.how, decision.setting) == ("shortest_first", "forced", "scheduler.policy")
    assert {v.name for v in decision.verdicts} == {"fcfs", "priority", "shortest_first"}


def test_an_unknown_policy_is_an_error_with_close_names(model: str) -> None:
    with pytest.raises(ConfigError) as caught:
        start(model, policy="priorty")
    error = caught.value
    assert error.message == "no such plugin in scheduling_policies: scheduler.policy names 'priorty'"
    assert (error.field, error.value) == ("scheduler.policy", "priorty")
    assert error.remedy == "did you mean 'priority'? installed: fcfs, priority"


@pytest.mark.parametrize("kind", ["raise", "nan", "text", "number"])
def test_a_request_without_a_place_ends_alone(model: str, kind: str) -> None:
    llm = start(model, policy="broken", plugins=[Broken])
    params = [greedy(3), greedy(3, extra_args={"key": kind}), greedy(3)]
    outputs = llm.generate([prompt(i, 6) for i in range(3)], params)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 0, 3]
    drain(llm)
