"""Reports about other engines, as tests of this one: ends, bans, seeds, penalties, rows of a batch.

A test is named after its report in a public tracker, which the docstring cites; each shows what is right.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import Engine, Models
from hf import Tiny, assert_logprobs, changed_copy, random_prompts
from scripted import START, make_scripted

from jackfield import LLM, AsyncLLM, SamplingParams

PROMPT = random_prompts((20,), seed=8)[0]


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **changes})


def ids(llm: LLM, prompt: list[int] = PROMPT, **changes: Any) -> list[int]:
    found: list[int] = llm.generate([prompt], greedy(**changes))[0].outputs[0].token_ids
    return found


def test_e58_a_sampled_token_outside_the_top_is_one_entry_more(engine: Engine, models: Models) -> None:
    """vllm-project/vllm#31081: k + 1 entries instead of k moved all later beams."""
    completion = (
        engine(models["llama"].folder)
        .generate([PROMPT], greedy(temperature=1.5, seed=2, max_tokens=40, logprobs=2))[0]
        .outputs[0]
    )
    sizes = [len(entry) for entry in completion.logprobs or []]
    outside = [
        (entry[t].rank or 0) > 2 for t, entry in zip(completion.token_ids, completion.logprobs or [], strict=True)
    ]
    assert sizes == [2 + more for more in outside]
    assert set(sizes) == {2, 3}
    assert_logprobs(models["llama"].model, PROMPT, completion, 2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("temperature", [1e-45, 9e-6, 1e-5, 1e-4])
def test_e60_tiny_temperatures_are_greedy(engine: Engine, text_model: Tiny, dtype: str, temperature: float) -> None:
    """microsoft/aici#19: logits divided by 1e-5 overflowed to NaN."""
    llm = engine(text_model.folder, dtype=dtype, max_num_seqs=4)
    assert ids(llm, temperature=temperature, seed=1, top_p=0.9) == ids(llm)


def test_e62_no_end_of_the_list_comes_before_min_tokens(engine: Engine, text_model: Tiny, tmp_path: Path) -> None:
    """vllm-project/vllm#5849: only the first end id was held off, or the list was lost between processes."""
    folder = ending(text_model, tmp_path, [256, 101, 102])
    params = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=8, logit_bias={101: 100.0, 102: 90.0})
    output = engine(folder).generate([PROMPT], params)[0].outputs[0].token_ids
    assert len(output) == 9 and output[-1] == 101 and not {256, 101, 102} & set(output[:-1])

    async def served() -> list[int]:
        llm = await AsyncLLM.start(str(folder), skip_tokenizer_init=True, kv_cache_memory="16MiB", max_num_seqs=4)
        try:
            return [o.outputs[0].token_ids async for o in llm.generate({"prompt_token_ids": PROMPT}, params)][-1]
        finally:
            await llm.shutdown()

    assert asyncio.run(served()) == output


def ending(tiny: Tiny, tmp_path: Path, ends: list[int]) -> Path:
    """Return a copy of a model whose generation_config.json names these ends."""
    folder = Path(changed_copy(tiny.folder, tmp_path / "ending"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def test_e66_ignore_eos_ignores_all_ends_and_no_stop_of_the_user(
    engine: Engine, text_model: Tiny, tmp_path: Path
) -> None:
    """vllm-project/vllm#4589: an end of generation_config.json still ended."""
    llm = engine(ending(text_model, tmp_path, [256, 101, 102]))
    ends: dict[str, Any] = {"allowed_token_ids": [101, 102, 256], "max_tokens": 50}
    for likely in (101, 102, 256):
        assert ids(llm, logit_bias={likely: 100.0}, **ends) == [likely] * 50
        assert ids(llm, logit_bias={likely: 100.0}, ignore_eos=False, **ends) == [likely]
    assert ids(llm, logit_bias={101: 100.0}, stop_token_ids=[101], **ends) == [101]


def test_e68_min_tokens_holds_with_drafts(engine: Engine, text_model: Tiny) -> None:
    """vllm-project/vllm#26317: with n-gram drafts min_tokens had no effect."""
    settings = {"speculative.method": "ngram", "speculative.num_speculative_tokens": 4}
    drafting = engine(text_model.folder, **settings, **{"plugins.options": {"ngram": {"min_n": 1}}})
    params: dict[str, Any] = {
        "min_tokens": 10,
        "max_tokens": 20,
        "ignore_eos": False,
        "logit_bias": {256: 50.0, 97: 40.0},
    }
    expected = ids(engine(text_model.folder), **params)
    assert expected == [97] * 10 + [256]
    assert ids(drafting, **params) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 5])
def test_e70_bans_never_let_a_token_out_that_is_not_allowed(
    engine: Engine, text_model: Tiny, temperature: float, top_k: int
) -> None:
    """vllm-project/vllm#57986: allow list and bad words together banned everything, and another token came out."""
    llm = engine(text_model.folder, skip_tokenizer_init=False)
    allowed: dict[str, Any] = {"allowed_token_ids": [100, 101], "temperature": temperature, "seed": 1, "top_k": top_k}
    assert set(ids(llm, bad_words=["d", "e"], **allowed)) <= {100, 101}
    assert set(ids(llm, logit_bias={100: float("-inf"), 101: float("-inf")}, **allowed)) <= {100, 101}
    assert set(ids(llm, stop_token_ids=[100, 101], min_tokens=5, **allowed)) <= {100, 101}
    assert set(ids(llm, bad_words=["d"], **allowed)) == {101}


def global_generators() -> Any:
    """Return the state of every generator that belongs to the process."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tolist(), state[2], torch.get_rng_state().tolist()


def test_e72_no_seed_means_another_text_and_global_generators_are_left_alone(engine: Engine, text_model: Tiny) -> None:
    """vllm-project/vllm#1211: a default seed gave everybody the same text and froze the host's own generators."""
    before = global_generators()
    llm = engine(text_model.folder, seed=3)
    fresh = engine(text_model.folder)
    answers = [ids(fresh, temperature=1.0) for _ in range(3)]
    ids(llm, temperature=1.0)
    ids(llm, temperature=1.0, seed=4)
    assert global_generators() == before
    assert len({tuple(answer) for answer in answers}) == 3


@pytest.mark.parametrize("mates", [0, 3])
def test_e74_ties_are_broken_by_the_smaller_id(engine: Engine, tmp_path: Path, mates: int) -> None:
    """vllm-project/vllm#16945: ties in top_k were resolved differently from run to run."""
    llm = engine(make_scripted(tmp_path / "scripted", "ab").folder)
    # Four ids tie in front of all others: only the smaller two may be drawn, whatever the rest of the batch keeps.
    params = greedy(temperature=0.1, top_k=2, seed=1, logit_bias=dict.fromkeys(range(256), -100.0), max_tokens=30)
    other = [greedy(temperature=1.0, top_k=50 * (i + 1), seed=i) for i in range(mates)]
    runs = [llm.generate([[START]] * (1 + mates), [params, *other])[0].outputs[0].token_ids for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]
    assert set(runs[0]) == {256, 257}


def test_e78_a_models_defaults_hold_where_a_request_says_nothing(
    engine: Engine, text_model: Tiny, tmp_path: Path
) -> None:
    """EleutherAI/lm-evaluation-harness#3154: the offline interface and the server had different rules.

    The rule: without parameters a request gets the model's defaults; parameters that are given are taken as they are.
    """
    folder = Path(changed_copy(text_model.folder, tmp_path / "defaults"))
    defaults = {"repetition_penalty": 5.0, "top_p": 0.8, "temperature": 0.0, "max_new_tokens": 30}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    llm = engine(folder)
    params = llm.default_sampling_params()
    assert (params.repetition_penalty, params.top_p, params.temperature, params.max_tokens) == (5.0, 0.8, 0.0, 30)
    assert dict(llm.sampling_defaults) == {
        "repetition_penalty": 5.0, "top_p": 0.8, "temperature": 0.0, "max_tokens": 30
    }  # fmt: skip
    silent = llm.generate([PROMPT])[0].outputs[0].token_ids
    stated = SamplingParams(temperature=0.0, repetition_penalty=5.0, max_tokens=30)
    assert silent == engine(text_model.folder).generate([PROMPT], stated)[0].outputs[0].token_ids
    neutral = SamplingParams(temperature=0.0, max_tokens=30)
    assert llm.generate([PROMPT], neutral)[0].outputs[0].token_ids != silent


def test_e80_a_requests_edits_stay_with_it_when_others_end(engine: Engine, text_model: Tiny) -> None:
    """ml-explore/mlx-lm#1225: when one request ended, another lost its processor or got somebody else's."""
    llm = engine(text_model.folder, max_num_seqs=5)
    count = 24
    params = [
        greedy(max_tokens=1 + (7 * i) % 11, allowed_token_ids=[i] if i % 3 else None, min_tokens=i % 2)
        for i in range(count)
    ]
    outputs = llm.generate([PROMPT] * count, params)
    free = ids(llm, max_tokens=11)
    for index, (output, one) in enumerate(zip(outputs, params, strict=True)):
        expected = [index] * 11 if index % 3 else free
        assert output.outputs[0].token_ids == expected[: one.max_tokens]
