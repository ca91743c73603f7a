"""Counterfactuals: what a user's value cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fakes import FakeAttention, attention_class

from jackfield.config.selection import ResolvedSelection
from jackfield.interfaces import AttentionRequest, Band, Preference, Reason
from jackfield.oracle import Decision, counterfactuals, decide
from jackfield.registry import Registry

RELAX: dict[str, Callable[[AttentionRequest], AttentionRequest]] = {
    "cache.block_size": lambda request: replace(request, block_size=None),
    "cache.dtype": lambda request: replace(request, cache_dtype=""),
}


class Rocket(FakeAttention):
    name = "rocket"
    wish = Preference(Band.BEST)

    @classmethod
    def check(cls, request: Any) -> Sequence[Reason]:
        return (Reason("block_size", "block_size", "8"),) if request.block_size == 8 else ()


def decider(*plugins: type[FakeAttention]) -> Callable[[AttentionRequest], Decision]:
    registry = Registry()
    for plugin in plugins:
        registry.register(plugin)
    return lambda request: decide(registry, "attention_backends", request, ResolvedSelection(), field="attention")


REQUEST = AttentionRequest(kind="full", block_size=8)
USER_SET = {"cache.block_size": 8, "cache.dtype": "int8", "seed": 3}


def test_a_value_that_cost_a_band_is_reported() -> None:
    (found,) = counterfactuals(decider(Rocket, attention_class("plain")), REQUEST, USER_SET, RELAX)
    assert found.text == "cache.block_size = 8 excluded rocket (BEST)"
    assert (found.instead, found.place) == ("plain", "attention_backends for target (full)")


def test_values_that_cost_nothing_are_not_reported() -> None:
    equal = attention_class("equal", wish=Preference(Band.BEST))
    assert counterfactuals(decider(Rocket, equal), REQUEST, USER_SET, RELAX) == []
    assert counterfactuals(decider(Rocket), replace(REQUEST, block_size=None), {}, RELAX) == []


def test_a_value_that_left_nothing() -> None:
    (found,) = counterfactuals(decider(Rocket), REQUEST, USER_SET, RELAX)
    assert (found.name, found.instead) == ("rocket", "")
