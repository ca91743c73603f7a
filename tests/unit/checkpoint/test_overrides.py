from __future__ import annotations

from typing import Any

import pytest
from checkpoint_files import write_folder

from jackfield.checkpoint import generation_defaults, overridden, read_facts

CONFIG = {"a": 1, "rope": {"type": "linear", "factor": 2.0}, "b": None, "x.y": 5}


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ({}, {}),
        ({"a": 2}, {"a": 2}),
        ({"rope": {"factor": 8.0}}, {"rope": {"type": "linear", "factor": 8.0}}),
        ({"rope.factor": 8.0}, {"rope": {"type": "linear", "factor": 8.0}}),
        ({"rope": {"type": None}}, {"rope": {"factor": 2.0}}),
        ({"rope": "none"}, {"rope": "none"}),
        ({"b": {"c": 1}}, {"b": {"c": 1}}),
        ({"b.c.d": 1}, {"b": {"c": {"d": 1}}}),
        ({"x.y": 6}, {"x.y": 6}),
        ({"new": [1]}, {"new": [1]}),
    ],
)
def test_what_becomes_of_a_configuration(overrides: dict[str, Any], changed: dict[str, Any]) -> None:
    once = overridden(CONFIG, overrides)
    assert once == {**CONFIG, **changed}
    assert overridden(once, overrides) == once


def test_null_takes_a_key_away() -> None:
    assert overridden(CONFIG, {"a": None, "rope": None}) == {"b": None, "x.y": 5}


def test_facts_follow_overrides(tmp_path: Any) -> None:
    folder = write_folder(
        tmp_path,
        {"config.json": {"architectures": ["X"], "dtype": "float16", "eos_token_id": 1}},
    )
    overrides = {
        "architectures": ["Y"],
        "dtype": "bfloat16",
        "eos_token_id": [3, 4],
        "quantization_config": {"quant_method": "FP8"},
    }
    facts = read_facts(folder, overrides=overrides)
    assert (facts.architecture, facts.dtype, facts.quantization) == ("Y", "bfloat16", "fp8")
    assert generation_defaults(facts).eos_token_ids == (3, 4)
