"""An engine on tiny models must give the reference's tokens, whatever its plugins are: in chunks and blocks of all
sizes, with a cache that is shared or too small, with drafts, and whoever comes beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jackfield.engine.llm import LLM
from jackfield.errors import NoCandidateError
from jackfield.protocol import SamplingParams
from jackfield.testing.pytest_plugin import engine_settings
from jackfield.testing.tiny import Tiny, assert_greedy, engine, make_tiny, random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
MODELS: Mapping[str, dict[str, Any]] = {
    "grouped heads": {"architecture": "LlamaForCausalLM"},
    "heads of 24": {"architecture": "LlamaForCausalLM", "num_key_value_heads": 4, "head_dim": 24},
    "windows": {"architecture": "MistralForCausalLM", "sliding_window": 24, "head_dim": 16},
    "normed heads": {"architecture": "Qwen3ForCausalLM", "head_dim": 32},
}
CASES: Mapping[str, dict[str, Any]] = {
    "as it comes": {},
    "chunked prompts": {"long_prefill_token_threshold": 16},
    "small steps": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    "blocks of 16": {"block_size": 16},
    "blocks of 64": {"block_size": 64},
    "preemption": {"block_size": 16, "num_blocks": 12, "max_num_seqs": 4},
    "drafts": {
        "speculative.method": "ngram",
        "speculative.num_speculative_tokens": 3,
        "speculative.adaptive": False,
        "plugins.options.ngram.min_n": 1,
    },
    "one at a time": {"max_num_seqs": 1},
}


class Engines:
    """Tiny models, made once, and engines on them with what the command line says."""

    def __init__(self, root: Path, settings: Mapping[str, Any]) -> None:
        self._root, self._settings = root, settings
        self._made: dict[str, Tiny] = {}

    def model(self, name: str) -> Tiny:
        """Return a tiny model."""
        if name not in self._made:
            self._made[name] = make_tiny(self._root / name.replace(" ", "_"), **MODELS[name])
        return self._made[name]

    @contextmanager
    def start(self, name: str, *, refusable: bool = True, **settings: Any) -> Iterator[LLM]:
        """Start an engine. Where the plugin serves no such layer the refusal must say why, and the test ends there."""
        try:
            made = engine(self.model(name).folder, **{**settings, **self._settings})
            llm = made.__enter__()
        except NoCandidateError as error:
            assert refusable, f"the plugin runs nothing of the suite: {error}"
            assert error.table, "a refusal shows all candidates with their reasons"
            pytest.skip(f"refused: {error.message.splitlines()[0]}")
        try:
            yield llm
        finally:
            made.__exit__(None, None, None)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Engines:
    """Engines of this session."""
    return Engines(tmp_path_factory.mktemp("suite"), engine_settings(pytestconfig))


def tokens(llm: LLM, prompts: Sequence[Sequence[int]], params: Any = GREEDY) -> list[list[int]]:
    """Return what the engine generates."""
    return [list(request.outputs[0].token_ids) for request in llm.generate([list(ids) for ids in prompts], params)]


def test_what_was_asked_for_is_what_runs(engines: Engines, pytestconfig: pytest.Config) -> None:
    backend = pytestconfig.getoption("attention_backend")
    with engines.start("grouped heads", refusable=False) as llm:
        names = {d.name for d in llm.report.decisions if d.family == "attention_backends"}
    assert names and (backend is None or names == {backend})


@pytest.mark.parametrize("name", list(MODELS))
def test_models(engines: Engines, name: str) -> None:
    prompts = random_prompts()
    with engines.start(name, long_prefill_token_threshold=32) as llm:
        assert_greedy(engines.model(name).model, prompts, tokens(llm, prompts))


@pytest.mark.parametrize("case", list(CASES))
def test_cases(engines: Engines, case: str) -> None:
    prompts = [*random_prompts((1, 9, 40, 77, 16, 17)), [7, 8, 9] * 6]
    with engines.start("grouped heads", **CASES[case]) as llm:
        assert_greedy(engines.model("grouped heads").model, prompts, tokens(llm, prompts))
        drafts = llm.get_metrics().drafts_proposed
    assert (drafts > 10) == (case == "drafts"), f"{drafts} tokens were drafted"


def test_prefixes_are_found_again(engines: Engines) -> None:
    shared = random_prompts((96,), seed=3)[0]
    prompts = [[*shared, *tail] for tail in random_prompts((5, 20, 1), seed=4)]
    with engines.start("grouped heads", block_size=16) as llm:
        first, second = tokens(llm, prompts), tokens(llm, prompts)
        again = llm.generate(prompts, GREEDY)
    assert_greedy(engines.model("grouped heads").model, prompts, first)
    assert first == second
    assert all((request.num_cached_tokens or 0) >= 80 for request in again), "a prompt that is kept was computed again"


def test_seeded_samples_do_not_depend_on_mates(engines: Engines) -> None:
    prompts = random_prompts((9, 30, 3, 50))
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=n, max_tokens=12, ignore_eos=True) for n in range(4)]
    with engines.start("grouped heads") as llm:
        together = tokens(llm, prompts, params)
        alone = [tokens(llm, [ids], [one])[0] for ids, one in zip(prompts, params, strict=True)]
    assert together == alone
