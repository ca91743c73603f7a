"""The kit passes what is right and fails on what is wrong, each fault by the test that is meant for it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, ClassVar

import pytest
from broken_plugins import Attention, Method, Order, Repeat, broken

from jackfield.interfaces import Option, Reason, RequestView
from jackfield.testing import (
    AttentionConformance,
    DrafterConformance,
    PluginConformance,
    QuantizationConformance,
    SchedulingConformance,
)
from jackfield.testing.attention_cases import STEPS, Query
from jackfield.testing.attention_shapes import Shape
from jackfield.testing.bench import Bench, device_for, facts_of, in_process_ref
from jackfield.testing.drafters import Seen


def bench_of(plugin: type[Any]) -> Bench:
    device = device_for(plugin)
    assert device is not None
    return Bench(in_process_ref(plugin), plugin, device, facts_of(device))


class Suites:
    """Conformance classes for classes of this process."""

    attention = type("A", (AttentionConformance,), {"installed": False})()
    quantization = type("Q", (QuantizationConformance,), {"installed": False})()
    drafter = type("D", (DrafterConformance,), {"installed": False})()
    scheduling = type("S", (SchedulingConformance,), {"installed": False})()


class Fixed:
    """Draws what it is told, in order: hypothesis would take its time to make a failure small."""

    def __init__(self, *values: Any) -> None:
        self._values = iter(values)

    def draw(self, strategy: object) -> Any:
        return next(self._values)


def write(bench: Bench) -> None:
    """Run the test of writes on one batch: the second of five tokens is not to be written."""
    test: Any = AttentionConformance.test_a_write_touches_its_slots_and_nothing_else
    batch = [Query(1, 5), Query(4, 3)]
    test.hypothesis.inner_test(Suites.attention, bench, "", batch, Fixed(4, {1}, -5))


ATTENTION = {
    "sees the next token": "prefill",
    "forgets what was kept": "chunks",
    "ignores the scale": "decode",
}


def test_a_right_backend_passes() -> None:
    suite, bench = Suites.attention, bench_of(Attention)
    for kind in STEPS:
        suite.test_each_kind_of_step(bench, kind, None, 4)
    write(bench)
    suite.test_ranks_compute_their_heads(bench, 2, "plain")
    suite.test_it_behaves_as_it_declares(bench)
    suite.test_something_is_accepted(Attention, bench)


@pytest.mark.parametrize("fault", list(ATTENTION))
def test_wrong_numbers_are_found(fault: str) -> None:
    with pytest.raises(AssertionError, match="not close"):
        Suites.attention.test_each_kind_of_step(bench_of(broken(Attention, fault)), ATTENTION[fault], None, 4)


@pytest.mark.parametrize("fault", ["writes where it must not", "touches a neighbour"])
def test_wrong_writes_are_found(fault: str) -> None:
    with pytest.raises(AssertionError):
        write(bench_of(broken(Attention, fault)))


def test_a_claim_that_is_not_kept_is_found() -> None:
    boastful = type("Boastful", (Attention,), {"features": Attention.features | {"softcap"}})
    with pytest.raises(AssertionError, match="not close"):
        Suites.attention.check(bench_of(boastful), Shape(softcap=0.5), STEPS["mixed"])
    boastful = type("Boastful", (Attention,), {"features": Attention.features | {"tree"}})
    with pytest.raises(AssertionError, match="not close"):
        Suites.attention.test_each_kind_of_tree(bench_of(boastful), "two branches", None)


def test_what_is_refused_is_not_run() -> None:
    Suites.attention.check(bench_of(broken(Attention, "ignores the scale")), Shape(softcap=0.5), STEPS["mixed"])


def test_a_right_method_passes() -> None:
    bench = bench_of(Method)
    for name in ("qkv", "down", "embedding"):
        Suites.quantization.test_parameters_cover_what_is_loaded_once(bench, "float32", name)
        Suites.quantization.test_what_is_read_back_is_what_was_stored(bench, "float32", name)
        Suites.quantization.test_cut_then_applied_is_applied_then_cut(bench, "float32", name, 4)
    Suites.quantization.test_products(bench, "float32", "qkv", 3)
    Suites.quantization.test_what_is_folded_is_what_the_ops_give(bench, "float32", 3)


METHODS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "loads it twice": ("test_parameters_cover_what_is_loaded_once", ("qkv",)),
    "rolls rows": ("test_what_is_read_back_is_what_was_stored", ("qkv",)),
    "scales products": ("test_the_identity_gives_the_weight", ("qkv",)),
    "ignores out": ("test_products", ("qkv", 3)),
    "takes nothing": ("test_some_layer_is_taken", ()),
    "folds what is not beside it": ("test_what_is_folded_is_what_the_ops_give", (16,)),
    "leaves another sum": ("test_what_is_folded_is_what_the_ops_give", (1,)),
    "forgets the norm": ("test_what_is_folded_is_what_the_ops_give", (1,)),
    "swaps the gate": ("test_what_is_folded_is_what_the_ops_give", (3,)),
}


@pytest.mark.parametrize("fault", list(METHODS))
def test_wrong_methods_are_found(fault: str) -> None:
    name, arguments = METHODS[fault]
    with pytest.raises(AssertionError):
        getattr(Suites.quantization, name)(bench_of(broken(Method, fault)), "float32", *arguments)


@pytest.mark.parametrize("fault", ["", "pads before drafts", "leaves the vocabulary", "proposes nothing"])
def test_wrong_drafts_are_found(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plugin = broken(Repeat, fault)
    seen: Seen = inspect.unwrap(DrafterConformance.seen)(Suites.drafter, plugin, monkeypatch)  # type: ignore[arg-type]
    if not fault:
        Suites.drafter.test_greedy_tokens_are_those_without_it(plugin, seen, tmp_path)
        return
    with pytest.raises(AssertionError):
        Suites.drafter.test_greedy_tokens_are_those_without_it(plugin, seen, tmp_path)


@pytest.mark.parametrize("fault", ["", "counts questions", "not a number", "lengths differ"])
def test_wrong_policies_are_found(fault: str) -> None:
    plugin = broken(Order, fault)
    test: Any = SchedulingConformance.test_keys_are_numbers_and_depend_on_the_request_alone
    views = [RequestView(str(n), n, 0, 3 + n, 8) for n in range(4)]
    if not fault:
        test.hypothesis.inner_test(Suites.scheduling, plugin.build(None), views)
        return
    with pytest.raises(AssertionError):
        test.hypothesis.inner_test(Suites.scheduling, plugin.build(None), views)


class Common:
    """Classes that break a rule of all families."""

    class Impure(Attention):
        """Answers differently each time."""

        asked: ClassVar[list[int]] = []

        @classmethod
        def check(cls, request: Any) -> list[Reason]:
            """Refuse every second time."""
            cls.asked.append(1)
            return [Reason("mood", "mood", "not now")] if len(cls.asked) % 2 else []

    class Raising(Attention):
        """Raises when asked."""

        @classmethod
        def check(cls, request: Any) -> list[Reason]:
            """Raise."""
            raise RuntimeError("boom")

    class Silent(Attention):
        """Refuses with empty words."""

        @classmethod
        def check(cls, request: Any) -> list[Reason]:
            """Refuse."""
            return [Reason("", "", "")]

    class Nothing(Attention):
        """Takes nothing."""

        kinds: ClassVar[frozenset[str]] = frozenset({"a kind that no model has"})

    class Options(Attention):
        """Has a default that does not fit."""

        options: ClassVar[Any] = {"splits": Option(int, "four", "parts")}

    class Unwritten(Attention):
        """Says nothing of itself."""

        summary = ""


RULES = {
    "Impure": "test_answers_are_pure_and_never_raise",
    "Raising": "test_answers_are_pure_and_never_raise",
    "Silent": "test_refusals_have_reasons",
    "Nothing": "test_something_is_accepted",
    "Options": "test_its_options_have_defaults_that_fit",
    "Unwritten": "test_it_is_a_complete_class_of_its_family",
}


@pytest.mark.parametrize("name", list(RULES))
def test_rules_of_all_families(name: str) -> None:
    plugin = getattr(Common, name)
    test = getattr(Suites.attention, RULES[name])
    given = {"plugin": plugin, "bench": bench_of(plugin)}
    arguments = [given[parameter] for parameter in inspect.signature(test).parameters]
    with pytest.raises(Exception) as caught:
        test(*arguments)
    assert caught.type is not TypeError


def test_raising_is_no_refusal() -> None:
    with pytest.raises(AssertionError, match="does not answer"):
        bench_of(Common.Raising).accepts(Shape().request())


def test_a_plugin_that_is_not_installed_is_told_what_to_do() -> None:
    ref = inspect.unwrap(PluginConformance.ref)
    with pytest.raises(AssertionError, match=r'"jackfield.attention_backends.v1"; declare it in pyproject.toml'):
        ref(AttentionConformance(), Attention)
