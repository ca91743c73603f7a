"""Greedy tokens and log probabilities of tiny random models equal HF transformers', however a run is cut into steps."""

from __future__ import annotations

from typing import Any

import pytest
from engines import TINY, Engine, Models
from hf import WINDOW, assert_equal, assert_logprobs, random_prompts

from jackfield import LLM, SamplingParams
from jackfield.errors import CheckpointError

LENGTHS = (1, 2, 7, 16, 33, 64, 90, 3)
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [request.outputs[0].token_ids for request in llm.generate(prompts, params)]


@pytest.mark.parametrize("name", TINY)
def test_batch_and_each_alone_equal_the_reference(engine: Engine, models: Models, name: str) -> None:
    tiny = models[name]
    llm = engine(tiny.folder)
    prompts = random_prompts(LENGTHS)
    batch = tokens(llm, prompts)
    assert [len(output) for output in batch] == [32] * len(prompts)
    assert_equal(tiny.model, prompts, batch)
    assert_equal(tiny.model, prompts, [tokens(llm, [prompt])[0] for prompt in prompts])


@pytest.mark.parametrize("name", TINY)
def test_logprobs_equal_the_reference(engine: Engine, models: Models, name: str) -> None:
    tiny = models[name]
    prompts = random_prompts((5, 70))
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=5)
    for prompt, request in zip(prompts, engine(tiny.folder).generate(prompts, params), strict=True):
        assert_logprobs(tiny.model, prompt, request.outputs[0], count=5)
        completion = request.outputs[0]
        own = [entry[token] for token, entry in zip(completion.token_ids, completion.logprobs or [], strict=True)]
        assert completion.cumulative_logprob == pytest.approx(sum(one.logprob for one in own))
        assert {one.rank for one in own} == {1}


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_windows_equal_the_reference_far_past_the_window(engine: Engine, models: Models, name: str) -> None:
    tiny = models[name]
    prompts = random_prompts((WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 7 * WINDOW + 5))
    llm = engine(tiny.folder, block_size=8, long_prefill_token_threshold=11)
    assert_equal(tiny.model, prompts, tokens(llm, prompts, SamplingParams(temperature=0.0, max_tokens=3 * WINDOW)))


def test_files_are_as_many_as_their_names_say(models: Models) -> None:
    assert len(list(models["llama"].folder.glob("*.safetensors"))) == 1
    assert len(list(models["llama_shards"].folder.glob("*.safetensors"))) == 3


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
CUTS: dict[str, dict[str, Any]] = {
    "one token of a prompt in a step": {"long_prefill_token_threshold": 1},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "chunks of 64": {"long_prefill_token_threshold": 64},
    "a budget of 16": {"max_num_batched_tokens": 16},
    "a budget of 1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "no chunks": {"enable_chunked_prefill": False},
    "blocks of 1": {"block_size": 1},
    "blocks of 16": {"block_size": 16},
    "blocks of 64": {"block_size": 64},
    "no prefix cache": {"enable_prefix_caching": False},
    "few slots": {"max_num_seqs": 3},
    "preemption": {"block_size": 4, "num_blocks": 36, "max_model_len": 128},
    "preemption, blocks of 1": {"block_size": 1, "num_blocks": 140, "max_model_len": 128},
    "overlap": {"async_scheduling": True},
    "overlap, chunks of 7": {"async_scheduling": True, "long_prefill_token_threshold": 7},
    "overlap, preemption": {"async_scheduling": True, "block_size": 4, "num_blocks": 36, "max_model_len": 128},
    "drafts": {"speculative": DRAFTS},
    "drafts, chunks of 7": {"speculative": DRAFTS, "long_prefill_token_threshold": 7},
    "drafts, preemption": {
        "speculative": DRAFTS,
        "block_size": 4,
        "num_blocks": 36,
        "max_model_len": 128,
    },
}
"""Ways to cut the same work into steps and blocks. So many groups of layers need so many times the blocks."""


def cut_settings(name: str, groups: int) -> dict[str, Any]:
    settings = dict(CUTS[name])
    if "num_blocks" in settings:
        settings["num_blocks"] *= groups
    return settings


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("cut", CUTS)
def test_any_cut_gives_the_reference(engine: Engine, models: Models, name: str, cut: str) -> None:
    tiny = models[name]
    # Repeated pieces give a drafter something to find.
    pieces = random_prompts((3, 5, 9))
    prompts = [*random_prompts(LENGTHS), pieces[0] * 8, pieces[1] * 9, pieces[2] * 4]
    llm = engine(tiny.folder, **cut_settings(cut, groups=3 if name == "qwen2" else 1))
    assert_equal(tiny.model, prompts, tokens(llm, prompts))


@pytest.mark.parametrize("cut", ["preemption", "preemption, blocks of 1", "overlap, preemption", "drafts, preemption"])
def test_small_pools_really_preempt(engine: Engine, models: Models, cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(models["llama"].folder, **CUTS[cut])
    victims = count_calls(monkeypatch, llm._core.scheduler, "_preempt")
    tokens(llm, random_prompts(LENGTHS))
    assert victims


def test_drafts_are_really_kept(engine: Engine, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(models["llama"].folder, speculative=DRAFTS)
    steps = count_calls(monkeypatch, llm._core.scheduler, "update")
    # One token alone repeats for ever: every draft of it is right.
    params = SamplingParams(temperature=0.0, max_tokens=32, allowed_token_ids=[7])
    assert tokens(llm, [[7] * 8], params) == [[7] * 32]
    assert len(steps) <= 20


def count_calls(monkeypatch: pytest.MonkeyPatch, holder: Any, name: str) -> list[tuple[Any, ...]]:
    """Return a list that grows by the arguments of each call of a method, which goes on as before."""
    calls: list[tuple[Any, ...]] = []
    method = getattr(holder, name)

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return method(*arguments)

    monkeypatch.setattr(holder, name, counted)
    return calls


@pytest.mark.parametrize("settings", [{}, {"block_size": 4}, {"async_scheduling": True, "block_size": 4}])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_cached_prefixes_give_the_reference(
    engine: Engine, models: Models, name: str, settings: dict[str, Any]
) -> None:
    tiny = models[name]
    llm = engine(tiny.folder, **settings)
    start = random_prompts((100,))[0]
    prompts = [[*start[:size], *tail] for size in (100, 64, 65, 33) for tail in random_prompts((0, 1, 20), seed=5)]
    first = llm.generate([start], GREEDY)[0]
    again = llm.generate(prompts, GREEDY)
    assert first.num_cached_tokens == 0
    assert all(request.num_cached_tokens >= 32 for request in again)
    assert_equal(tiny.model, prompts, [request.outputs[0].token_ids for request in again])


def test_salts_separate_cached_prefixes(engine: Engine, models: Models) -> None:
    llm = engine(models["llama"].folder, block_size=4)
    prompt = random_prompts((40,))[0]
    found = [
        llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, GREEDY)[0].num_cached_tokens
        for salt in ("a", "b", "a")
    ]
    assert found == [0, 0, 36]


def test_overrides_change_the_model(engine: Engine, models: Models) -> None:
    tiny = models["llama"]
    prompts = random_prompts((40,))
    scaled = engine(
        tiny.folder, hf_overrides={"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8}}
    )
    plain = engine(tiny.folder)
    assert tokens(plain, prompts) != tokens(scaled, prompts)


def test_unread_key_is_an_error_unless_allowed(engine: Engine, models: Models) -> None:
    tiny = models["llama"]
    with pytest.raises(CheckpointError) as caught:
        engine(tiny.folder, hf_overrides={"logit_scale": 0.5})
    assert caught.value.message == "nothing reads these keys of the configuration: logit_scale = 0.5"
    assert caught.value.value == ["logit_scale"]
    assert caught.value.field == str(tiny.folder)
    allowed = engine(tiny.folder, hf_overrides={"logit_scale": 0.5}, allow_unused_config_keys=["logit_scale"])
    prompts = random_prompts((9,))
    assert_equal(tiny.model, prompts, tokens(allowed, prompts))
