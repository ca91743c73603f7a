"""The example's backends, in this process: right tokens alone, per phase, per layer; errors where they do not fit."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import CPU_ATTENTION, Engine, Models
from hf import assert_equal, random_prompts

from jackfield import LLM, SamplingParams
from jackfield.errors import ConfigError, NoCandidateError

SOURCE = Path(__file__).parents[2] / "examples" / "third_party_plugin" / "src"
LENGTHS = (1, 9, 40, 77)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)

CHOICES: dict[str, tuple[Any, list[tuple[str, str]]]] = {
    "forced": ("rocket", [("full", "rocket")]),
    "other layout": ("rocket_rows", [("full", "rocket_rows")]),
    "preferred": ({"prefer": ["rocket_rows", "rocket"]}, [("full", "rocket_rows")]),
    "prefill": (
        {"phases": {"prefill": "rocket", "decode": "torch_sdpa"}},
        [("full", "rocket"), ("full", "torch_sdpa")],
    ),
    "decode": (
        {"phases": {"prefill": "torch_sdpa", "decode": "rocket"}},
        [("full", "torch_sdpa"), ("full", "rocket")],
    ),
    "one layer": ({"layers": {"1": "rocket"}}, [("full.0", CPU_ATTENTION), ("full.1", "rocket")]),
    "a range": ({"layers": {"0-1": "rocket"}}, [("full.0", "rocket"), ("full.1", CPU_ATTENTION)]),
    "a pattern": ({"layers": {"layers.2.*": "rocket"}}, [("full.0", CPU_ATTENTION), ("full.1", "rocket")]),
    "by kind": ({"kinds": {"full": "rocket"}}, [("full", "rocket")]),
    "layouts per layer": (
        {"layers": {"1": "rocket_rows"}},
        [("full.0", CPU_ATTENTION), ("full.1", "rocket_rows")],
    ),
}
"""The user's word, and (subject, backend) of every decision on attention that follows."""


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    monkeypatch.syspath_prepend(str(SOURCE))
    module = importlib.import_module("acme_rocket.backend")
    yield [module.Rocket, module.RocketRows]
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_rocket"]:
        del sys.modules[name]


def chosen(llm: LLM) -> list[tuple[str, str]]:
    decisions = [d for d in llm.report.decisions if d.family == "attention_backends"]
    return [(str(decision.request["subject"]), decision.name) for decision in decisions]


@pytest.mark.parametrize("choice", CHOICES)
def test_choice_is_used_and_gives_the_reference(
    engine: Engine, models: Models, backends: list[Any], choice: str
) -> None:
    tiny = models["llama"]
    word, expected = CHOICES[choice]
    llm = engine(tiny.folder, plugins=backends, attention=word, long_prefill_token_threshold=16, block_size=8)
    assert chosen(llm) == expected
    prompts = random_prompts(LENGTHS)
    assert_equal(tiny.model, prompts, [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)])


def test_not_chosen_without_a_word(engine: Engine, models: Models, backends: list[Any]) -> None:
    llm = engine(models["llama"].folder, plugins=backends)
    assert chosen(llm) == [("full", CPU_ATTENTION)]
    assert "acme_rocket.layer" not in sys.modules


def test_phases_need_a_layout_in_common(engine: Engine, models: Models, backends: list[Any]) -> None:
    word = {"phases": {"prefill": "rocket_rows", "decode": "torch_sdpa"}}
    with pytest.raises(ConfigError) as caught:
        engine(models["llama"].folder, plugins=backends, attention=word)
    error = caught.value
    assert error.message == "attention 'full': prefill by rocket_rows and decode by torch_sdpa share no cache layout"
    assert (error.field, error.value) == ("attention.phases", "rocket_rows, torch_sdpa")
    assert error.remedy == "use one backend for both phases, or two that store keys and values alike"


def test_layers_of_a_kind_it_does_not_serve(engine: Engine, models: Models, backends: list[Any]) -> None:
    with pytest.raises(NoCandidateError) as caught:
        engine(models["qwen2"].folder, plugins=backends, attention="rocket")
    assert caught.value.field == "attention.force"
    assert "kind: 'sliding' is not among 'full'" in caught.value.message
    mixed = engine(models["qwen2"].folder, plugins=backends, attention={"kinds": {"full": "rocket"}})
    assert [name for _, name in chosen(mixed)] == ["rocket", CPU_ATTENTION]
    prompts = random_prompts(LENGTHS)
    tokens = [request.outputs[0].token_ids for request in mixed.generate(prompts, GREEDY)]
    assert_equal(models["qwen2"].model, prompts, tokens)
