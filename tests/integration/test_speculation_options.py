"""With any drafter and every option a request gets what it gets without: drafts cost or save time, nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from engines import Engine, Models
from hf import Tiny, random_prompts
from speculation_drafters import FAILING, HOSTILE, Branching, Knowing, TestDrafter

from jackfield import LLM, SamplingParams
from jackfield.errors import ConfigError

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.3},
    "penalties": {"presence_penalty": 0.9, "frequency_penalty": 0.6},
    "bias": {"logit_bias": {97: 3.0, 98: -100.0, 99: 2.0}},
    "allowed": {"allowed_token_ids": [97, 98, 99, 100]},
    "bad words": {"allowed_token_ids": [97, 98, 99, 100, 101], "bad_words": ["ab", "ca", "dd"]},
    "min tokens": {"min_tokens": 9, "ignore_eos": False, "logit_bias": {256: 4.0}},
    "stop strings": {"stop": ["a", "q", "Z"], "logit_bias": {97: 2.5, 113: 2.5}},
    "stop ids": {"stop_token_ids": list(range(0, 256, 7)), "min_tokens": 3},
    "logprobs": {"logprobs": 3, "repetition_penalty": 1.1},
    "prompt logprobs": {"prompt_logprobs": 2},
    "all logprobs": {"logprobs": -1, "max_tokens": 4},
    "seed": {"temperature": 1.0, "seed": 11},
    "several": {"temperature": 0.9, "seed": 3, "n": 3},
    "min_p": {"temperature": 1.5, "seed": 4, "min_p": 0.2},
    "top_k": {"temperature": 1.5, "seed": 5, "top_k": 3, "logprobs": 1},
    "top_p": {"temperature": 0.8, "seed": 6, "top_p": 0.7, "frequency_penalty": 0.3},
    "repeats itself": {"allowed_token_ids": [97], "repetition_detection": {"max_pattern_size": 3, "min_count": 4}},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "to the end": {"max_tokens": None, "allowed_token_ids": [97, 98, 99]},
}
LENGTH = 96
PROMPTS = [[97, 98, 99, 97, 98], *random_prompts((1, 33))]
Kind = type[TestDrafter] | str
DRAFTERS: dict[str, Kind] = {"ngram": "ngram", "suffix": "suffix", **{kind.name: kind for kind in HOSTILE}}


def params() -> list[SamplingParams]:
    common = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    return [SamplingParams(**{**common, **options}) for options in OPTIONS.values()]


def settings(kind: Kind, drafts: int = 4) -> dict[str, Any]:
    found: dict[str, Any] = {
        "speculative.method": kind if isinstance(kind, str) else kind.name,
        "speculative.num_speculative_tokens": drafts,
        "speculative.adaptive": False,
        "max_model_len": LENGTH,
        "skip_tokenizer_init": False,
    }
    if isinstance(kind, str):
        return {**found, "plugins.options": {"ngram": {"min_n": 1}} if kind == "ngram" else {}}
    return {**found, "plugins": [kind]}


def answers(llm: LLM, prompts: Sequence[list[int]] = PROMPTS) -> list[Any]:
    """Return what every prompt gets with every option, all served together."""
    wishes = params()
    return llm.generate([p for p in prompts for _ in wishes], wishes * len(prompts))


@pytest.fixture(scope="module")
def expected(text_model: Tiny) -> Callable[[], list[Any]]:
    """Return what an engine without drafts says."""

    @cache
    def once() -> list[Any]:
        llm = LLM(str(text_model.folder), max_model_len=LENGTH, max_num_seqs=16, kv_cache_memory="16MiB")
        found = answers(llm)
        llm.shutdown()
        Knowing.texts = [o.prompt_token_ids + c.token_ids for o in found for c in o.outputs]
        return found

    return once


def assert_same(found: list[Any], expected: list[Any]) -> None:
    names = list(OPTIONS) * (len(expected) // len(OPTIONS))
    for name, one, other in zip(names, found, expected, strict=True):
        for mine, right in zip(one.outputs, other.outputs, strict=True):
            assert (mine.token_ids, mine.text) == (right.token_ids, right.text), name
            assert (mine.finish_reason, mine.stop_reason) == (right.finish_reason, right.stop_reason), name
            assert_logprobs(mine.logprobs, right.logprobs, name)
            assert mine.logprobs is None or len(mine.logprobs) == len(mine.token_ids)
        assert_logprobs(one.prompt_logprobs, other.prompt_logprobs, name)


def assert_logprobs(found: Any, expected: Any, name: str) -> None:
    assert (found is None) == (expected is None), name
    for mine, right in zip(found or [], expected or [], strict=True):
        assert (mine is None) == (right is None)
        for token, entry in (mine or {}).items():
            assert entry.logprob == pytest.approx(right[token].logprob, abs=1e-4), name


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_option_gives_what_it_gives_without_drafts(
    engine: Engine, text_model: Tiny, expected: Any, name: str
) -> None:
    right = expected()
    llm = engine(text_model.folder, **settings(DRAFTERS[name]))
    assert_same(answers(llm), right)
    metrics = llm.get_metrics()
    assert metrics.drafts_proposed > 100
    if name in ("ngram", "suffix", "repeating", "knowing", "branching"):
        assert metrics.drafts_accepted > 50, "nothing was tested"


ENGINES: dict[str, dict[str, Any]] = {
    "few blocks": {"block_size": 4, "num_blocks": 60, "kv_cache_memory": None},
    "few blocks, no prefixes": {
        "block_size": 4,
        "num_blocks": 60,
        "enable_prefix_caching": False,
        "kv_cache_memory": None,
    },
    "small chunks": {"long_prefill_token_threshold": 3, "block_size": 4},
    "a small budget": {"max_num_batched_tokens": 17, "block_size": 8},
    "no chunks": {"enable_chunked_prefill": False, "max_num_batched_tokens": LENGTH, "max_num_seqs": 3},
    "blocks of 1": {"block_size": 1},
    "one at a time": {"max_num_seqs": 1},
    "as many drafts as pay": {"speculative.adaptive": True},
}


QUICK = ("few blocks", "small chunks", "a small budget", "as many drafts as pay")


@pytest.mark.parametrize(
    "setup", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ENGINES]
)
@pytest.mark.parametrize("kind", [Knowing, Branching], ids=lambda kind: kind.name)
def test_every_engine_gives_the_same(
    engine: Engine, text_model: Tiny, expected: Any, setup: str, kind: type[TestDrafter]
) -> None:
    right = expected()
    if kind is Branching and setup == "as many drafts as pay":
        with pytest.raises(ConfigError, match="branches are of a fixed number"):
            engine(text_model.folder, **{**settings(kind), **ENGINES[setup]})
        return
    llm = engine(text_model.folder, **{**settings(kind, drafts=3 if kind is Knowing else 7), **ENGINES[setup]})
    assert_same(answers(llm), right)
    metrics = llm.get_metrics()
    assert metrics.drafts_accepted > (0 if setup == "as many drafts as pay" else 50)
    assert (metrics.preemptions > 0) == setup.startswith("few blocks")


@pytest.mark.parametrize("kind", FAILING, ids=lambda kind: kind.name)
def test_a_drafter_that_fails_is_named_and_switched_off(
    engine: Engine, text_model: Tiny, expected: Any, kind: type[TestDrafter], caplog: pytest.LogCaptureFixture
) -> None:
    right = expected()
    llm = engine(text_model.folder, **settings(kind))
    with caplog.at_level(logging.ERROR, logger="jackfield.drafters"):
        assert_same(answers(llm, PROMPTS[:1]), right[: len(OPTIONS)])
    (record,) = caplog.records
    assert record.getMessage() == f"drafter {kind.name} failed and is switched off; requests go on without drafts"
    before = llm.get_metrics().drafts_proposed
    llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=9))
    assert llm.get_metrics().drafts_proposed == before


@pytest.mark.parametrize("kind", HOSTILE, ids=lambda kind: kind.name)
def test_requests_that_are_given_up_leave_nothing(engine: Engine, models: Models, kind: type[TestDrafter]) -> None:
    llm = engine(models["llama"].folder, **{**settings(kind), "skip_tokenizer_init": True})
    for turn in range(4):
        names = [llm.enqueue({"prompt_token_ids": p}, SamplingParams(max_tokens=40, seed=turn)) for p in PROMPTS]
        for _ in range(2 + turn):
            llm._advance()
        for name in names[: 1 + turn % 3]:
            llm.abort(name)
    assert {c.finish_reason for o in llm.wait_for_completion() for c in o.outputs} == {"abort", "length"}


def kept(llm: LLM, slot: int = 0) -> tuple[int, list[torch.Tensor]]:
    """Return how many tokens of a running sequence are computed, and what the cache holds of each, by layer."""
    scheduler, parts = llm._core.scheduler, llm._core._executor.worker._runner._parts  # type: ignore[attr-defined]
    count = int(min(scheduler._table.computed[slot], scheduler._table.confirmed[slot] - 1))
    found = []
    for group_index, group in enumerate(scheduler.cache.groups):
        blocks = torch.tensor(list(scheduler.cache.table(slot, group_index)))
        for layer in group.layers:
            for plane in parts.caches[layer].values():
                found.append(plane[blocks])
    return count, found


@pytest.mark.parametrize("kind", HOSTILE, ids=lambda kind: kind.name)
def test_the_cache_behind_refused_drafts_is_that_of_an_engine_without(
    engine: Engine, models: Models, kind: type[TestDrafter]
) -> None:
    """Blocks hold exactly one token here, so that a block is a token's keys and values."""
    shared: dict[str, Any] = {"block_size": 1, "enable_prefix_caching": False, "skip_tokenizer_init": True}
    clean = engine(models["llama"].folder, **shared, max_model_len=LENGTH)
    drafting = engine(models["llama"].folder, **{**settings(kind), **shared})
    wish = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    for llm in (clean, drafting):
        llm.enqueue({"prompt_token_ids": PROMPTS[0]}, wish)
        while llm._core.scheduler._table.confirmed[0] < 40:
            llm._advance()
    (count, right), (other, found) = kept(clean), kept(drafting)
    shared_count = min(count, other)
    assert shared_count >= 38
    for mine, wanted in zip(found, right, strict=True):
        torch.testing.assert_close(mine[:shared_count], wanted[:shared_count], rtol=1e-4, atol=1e-5)
    for llm in (clean, drafting):
        llm.wait_for_completion()
