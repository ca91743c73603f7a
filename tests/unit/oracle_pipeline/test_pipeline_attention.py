"""The user's words on attention: used as said, or an error that names what the model has."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield.errors import ConfigError
from jackfield.interfaces import Band, BlockSizes, GraphSupport, Preference
from jackfield.oracle.resolution import Resolution
from oracle_pipeline.bench import WINDOWS, fitting, run

FITTING = fitting("fitting")


def chosen(resolution: Resolution) -> list[tuple[str, tuple[int, ...], str, str]]:
    return [(d.name, d.request.layers, d.prefill.name, d.decode.name) for d in resolution.attention]


SAID: dict[str, tuple[Any, list[tuple[str, tuple[int, ...], str, str]]]] = {
    "nothing": ({}, [("full", (0, 2), "fitting", "fitting"), ("sliding_16", (1, 3), "torch_sdpa", "torch_sdpa")]),
    "kind": (
        {"kinds": {"full": "torch_sdpa"}},
        [("full", (0, 2), "torch_sdpa", "torch_sdpa"), ("sliding_16", (1, 3), "torch_sdpa", "torch_sdpa")],
    ),
    "index": (
        {"layers": {"2": "torch_sdpa"}},
        [
            ("full.0", (0,), "fitting", "fitting"),
            ("full.1", (2,), "torch_sdpa", "torch_sdpa"),
            ("sliding_16", (1, 3), "torch_sdpa", "torch_sdpa"),
        ],
    ),
    "pattern": (
        {"layers": {"layers.[02].attention": {"exclude": ["fitting"]}}},
        [("full", (0, 2), "torch_sdpa", "torch_sdpa"), ("sliding_16", (1, 3), "torch_sdpa", "torch_sdpa")],
    ),
    "component": (
        {"components": {"target": "torch_sdpa"}},
        [("full", (0, 2), "torch_sdpa", "torch_sdpa"), ("sliding_16", (1, 3), "torch_sdpa", "torch_sdpa")],
    ),
    "layer over kind": (
        {"kinds": {"full": "torch_sdpa"}, "layers": {"0": "fitting"}},
        [
            ("full.0", (0,), "fitting", "fitting"),
            ("full.1", (2,), "torch_sdpa", "torch_sdpa"),
            ("sliding_16", (1, 3), "torch_sdpa", "torch_sdpa"),
        ],
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_words_are_used_where_they_belong(case: str) -> None:
    word, expected = SAID[case]
    good = fitting("fitting", preference=classmethod(lambda cls, request: Preference(Band.GOOD)))
    assert chosen(run(good, model=WINDOWS, attention=word)) == expected


def test_phases_are_decided_apart() -> None:
    twin = fitting("twin", block_sizes=BlockSizes(multiple_of=24))
    word = {"phases": {"prefill": "fitting", "decode": "twin"}}
    resolution = run(fitting("fitting", block_sizes=BlockSizes(multiple_of=16)), twin, attention=word)
    assert chosen(resolution) == [("full", (0, 1, 2, 3), "fitting", "twin")]
    decisions = [d for d in resolution.report.decisions if d.family == "attention_backends"]
    assert [(d.request["phase"], d.name, d.how) for d in decisions] == [
        ("prefill", "fitting", "forced"),
        ("decode", "twin", "forced"),
    ]
    assert decisions[1].request["needs"] == ["decode", "gqa"]
    assert resolution.attention[0].spec.block_sizes.multiple_of == 48
    assert resolution.config.cache.block_size == 48


def test_phases_without_a_common_layout() -> None:
    with pytest.raises(ConfigError) as caught:
        run(FITTING, attention={"phases": {"prefill": "fitting", "decode": "torch_sdpa"}})
    assert caught.value.message == (
        "attention 'full': prefill by fitting and decode by torch_sdpa share no cache layout"
    )
    assert caught.value.field == "attention.phases"


UNKNOWN: dict[str, tuple[Any, str, str, str]] = {
    "kind": (
        {"kinds": {"slidign": "torch_sdpa"}},
        "attention.kinds names 'slidign', which this model does not have",
        "attention.kinds",
        "did you mean 'sliding'?",
    ),
    "kind of another model": (
        {"kinds": {"mla": "torch_sdpa"}},
        "attention.kinds names 'mla', which this model does not have",
        "attention.kinds",
        "it has: full, sliding",
    ),
    "phase": (
        {"phases": {"prefil": "torch_sdpa"}},
        "attention.phases names 'prefil', which this model does not have",
        "attention.phases",
        "did you mean 'prefill'?",
    ),
    "component": (
        {"components": {"decoder": "torch_sdpa"}},
        "attention.components names 'decoder', which this model does not have",
        "attention.components",
        "it has: target",
    ),
    "layer": (
        {"layers": {"4": "torch_sdpa"}},
        "attention.layers names '4', which matches no layer",
        "attention.layers",
        "layers are 0 to 3, their paths layers.N.attention",
    ),
    "pattern": (
        {"layers": {"model.*": "torch_sdpa"}},
        "attention.layers names 'model.*', which matches no layer",
        "attention.layers",
        "layers are 0 to 3, their paths layers.N.attention",
    ),
    "nested": (
        {"kinds": {"full": {"phases": {"decoed": "torch_sdpa"}}}},
        "attention.phases names 'decoed', which this model does not have",
        "attention.phases",
        "did you mean 'decode'?",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_words_about_what_is_not_there(case: str) -> None:
    word, message, field, remedy = UNKNOWN[case]
    with pytest.raises(ConfigError) as caught:
        run(model=WINDOWS, attention=word)
    assert (caught.value.message, caught.value.field, caught.value.remedy) == (message, field, remedy)


def test_counterfactual_of_a_block_size() -> None:
    best = fitting(
        "best",
        block_sizes=BlockSizes(only=(64,)),
        preference=classmethod(lambda cls, request: Preference(Band.BEST, "measured")),
    )
    resolution = run(best, block_size=16)
    (found,) = resolution.report.counterfactuals
    assert found.text == "cache.block_size = 16 excluded best (BEST)"
    assert (found.instead, found.place) == ("torch_sdpa", "attention_backends for target, full")
    assert run(best, block_size=64).report.counterfactuals == ()
    assert run(best).report.counterfactuals == ()


def test_one_block_size_that_all_take() -> None:
    multiples = fitting("multiples", block_sizes=BlockSizes(multiple_of=128, smallest=256))
    word = {"kinds": {"full": "multiples"}}
    assert run(multiples, model=WINDOWS, attention=word).config.cache.block_size == 256


def test_no_block_size_that_all_take() -> None:
    three, five = (fitting(f"of_{n}", block_sizes=BlockSizes(only=(n,))) for n in (3, 5))
    with pytest.raises(ConfigError) as caught:
        run(three, five, attention={"layers": {"0-1": "of_3", "2-3": "of_5"}})
    assert caught.value.message == (
        "the chosen attention backends have no block size in common (full.0: one of (3,); full.1: one of (5,))"
    )
    assert caught.value.field == "cache.block_size"


def test_graph_mode_is_the_least_that_all_support() -> None:
    full, uniform = (
        fitting(name, graph_support=support)
        for name, support in (("full", GraphSupport.FULL), ("uniform", GraphSupport.UNIFORM))
    )
    said = [
        note
        for word in ("full", {"layers": {"0": "full"}, "force": "uniform"})
        for note in run(full, uniform, attention=word).report.notes
        if note.startswith("graphs: ")
    ]
    assert said == [
        "graphs: full, the minimum over the chosen attention backends",
        "graphs: uniform, the minimum over the chosen attention backends",
    ]
