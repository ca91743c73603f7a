"""Models with recurrent states go back behind refused drafts: tokens are the reference's, with any drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import Engine, Models
from hf import Tiny, assert_equal, random_prompts
from recurrent_models import RECIPES
from speculation_drafters import Guessing, Knowing, Repeating, TestDrafter

from jackfield import LLM, SamplingParams
from jackfield.errors import ConfigError

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = random_prompts((1, 5, 17, 40))
SLOW = ("mamba", "jamba", "falcon-h1", "minimax", "kimi-linear", "olmo-hybrid")
NAMES = ("mamba2", "lfm2", "qwen3.5", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))


@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return RECIPES[request.param].make(tmp_path_factory.mktemp(request.param))


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def drafting(engine: Engine, tiny: Tiny, kind: type[TestDrafter], **settings: Any) -> LLM:
    speculative = {"speculative.method": kind.name, "speculative.num_speculative_tokens": 4}
    return engine(tiny.folder, plugins=[kind], **{**speculative, "speculative.adaptive": False, **settings})


@pytest.mark.parametrize("tiny", NAMES, indirect=True)
def test_refused_drafts_leave_no_trace(engine: Engine, tiny: Tiny) -> None:
    expected = tokens(engine(tiny.folder))
    assert_equal(tiny.model, PROMPTS, expected)
    Knowing.texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    for kind in (Knowing, Guessing):
        llm = drafting(engine, tiny, kind)
        assert tokens(llm) == expected, kind.name
        metrics = llm.get_metrics()
        assert metrics.drafts_proposed > 100
        assert metrics.drafts_accepted < metrics.drafts_proposed, "nothing was refused"
        assert kind is Guessing or metrics.drafts_accepted > 50


SETUPS: dict[str, dict[str, Any]] = {
    "no prefix cache": {"enable_prefix_caching": False},
    "small chunks": {"long_prefill_token_threshold": 7, "block_size": 16},
    "few blocks": {"block_size": 16, "num_blocks": 12, "max_model_len": 96},
    "one at a time": {"max_num_seqs": 1},
    "many drafts": {"speculative.num_speculative_tokens": 12, "block_size": 16},
    "as many as pay": {"speculative.adaptive": True},
}


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("tiny", ["mamba2", pytest.param("qwen3.5", marks=pytest.mark.slow)], indirect=True)
def test_every_engine_gives_the_same(engine: Engine, tiny: Tiny, setup: str) -> None:
    expected = tokens(engine(tiny.folder))
    Knowing.texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    settings = dict(SETUPS[setup])
    if settings.get("num_blocks"):
        settings |= {"kv_cache_memory": None, "num_blocks": 7 if "mamba2" in str(tiny.folder) else 26}
    llm = drafting(engine, tiny, Knowing, **settings)
    assert tokens(llm) == expected
    longer = [[*prompt, *answer[:33]] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    short = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    assert tokens(llm, longer, short) == [answer[33:] for answer in expected], "from states that were kept"
    assert (llm.get_metrics().preemptions > 0) == (setup == "few blocks")


@pytest.mark.parametrize("tiny", ["lfm2"], indirect=True)
def test_seeds_and_penalties(engine: Engine, tiny: Tiny) -> None:
    wish = SamplingParams(temperature=1.0, seed=3, max_tokens=30, repetition_penalty=1.2, ignore_eos=True)
    expected = tokens(engine(tiny.folder), PROMPTS, wish)
    for kind in (Repeating, Guessing):
        assert tokens(drafting(engine, tiny, kind), PROMPTS, wish) == expected


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("blocks", [24, 80])
@pytest.mark.parametrize("tiny", ["qwen3.5"], indirect=True)
def test_a_draft_models_room_leaves_states_in_their_blocks(
    engine: Engine, models: Models, tiny: Tiny, blocks: int, cached: bool
) -> None:
    """Room for drafts may begin a block that no state is in yet."""
    expected = tokens(engine(tiny.folder))
    drafts = {"speculative.method": "draft_model", "speculative.model": str(models["llama"].folder)}
    drafts |= {"speculative.num_speculative_tokens": 5, "speculative.adaptive": False}
    few = {"block_size": 16, "num_blocks": blocks, "kv_cache_memory": None, "max_model_len": 96}
    llm = engine(tiny.folder, **few, **drafts, enable_prefix_caching=cached)
    for _ in range(2):
        assert tokens(llm) == expected
    assert (llm.get_metrics().preemptions > 0) == (blocks == 24)


@pytest.mark.parametrize("tiny", ["mamba2"], indirect=True)
def test_a_draft_model_with_states_is_refused(engine: Engine, models: Any, tiny: Tiny) -> None:
    settings = {"speculative.method": "draft_model", "speculative.model": str(tiny.folder)}
    with pytest.raises(ConfigError, match="of the draft model keep one state") as caught:
        engine(Path(models["llama"].folder), **settings)
    assert caught.value.field == "speculative.model"
