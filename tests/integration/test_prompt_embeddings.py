"""Prompts given as embeddings: a model's own embeddings of a text must do what the text does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engines import Engine, Models
from hf import Tiny, random_prompts

from jackfield import SamplingParams
from jackfield.errors import RequestError

PROMPTS = random_prompts([1, 6, 33, 70], seed=9)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks of 5": {"max_num_batched_tokens": 5, "max_num_seqs": 3},
    "overlapped": {"async_scheduling": True},
    "preempted": {"num_blocks": 10, "block_size": 16, "max_model_len": 96},
    "drafts": {"speculative": {"method": "ngram", "num_speculative_tokens": 2}},
}


def embeddings(tiny: Tiny, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = tiny.model.get_input_embeddings()(torch.tensor(prompt))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_embeddings_do_what_their_tokens_do(engine: Engine, models: Models, mode: str) -> None:
    tiny = models["llama"]
    llm = engine(tiny.folder, **MODES[mode])
    texts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    given: list[Any] = [{"prompt_embeds": embeddings(tiny, prompt)} for prompt in PROMPTS]
    expected = [output.outputs[0].token_ids for output in llm.generate(texts, GREEDY)]
    mixed = [prompt for pair in zip(given, texts, strict=True) for prompt in pair]
    for _ in range(2):
        outputs = [output.outputs[0].token_ids for output in llm.generate(mixed, GREEDY)]
        assert outputs[::2] == expected and outputs[1::2] == expected


def test_the_prefix_cache_tells_embeddings_apart(engine: Engine, models: Models) -> None:
    tiny = models["llama"]
    llm = engine(tiny.folder, block_size=8)
    first, second = (embeddings(tiny, prompt) for prompt in random_prompts([40, 40], seed=2))
    alone = [
        engine(tiny.folder).generate({"prompt_embeds": e}, GREEDY)[0].outputs[0].token_ids for e in (first, second)
    ]
    for given, expected, cached in ((first, alone[0], 0), (second, alone[1], 0), (first, alone[0], 32)):
        output = llm.generate({"prompt_embeds": given.numpy()}, GREEDY)[0]
        assert (output.outputs[0].token_ids, output.num_cached_tokens) == (expected, cached)


def test_a_recorded_decode_step_is_not_taken_for_a_placeholder(engine: Engine, models: Models) -> None:
    """One token of a prompt that is left to compute looks like a decode step."""
    tiny = models["llama"]
    llm = engine(tiny.folder, block_size=8)
    given = {"prompt_embeds": embeddings(tiny, random_prompts([33], seed=5)[0])}
    first = llm.generate(given, GREEDY)[0]
    second = llm.generate(given, GREEDY)[0]
    assert second.num_cached_tokens == 32
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


@pytest.mark.parametrize("values", [[[1.0] * 63], [1.0] * 64, [["a"] * 64], [[np.nan] * 64], np.zeros((0, 64))])
def test_malformed_embeddings_are_refused(engine: Engine, models: Models, values: Any) -> None:
    llm = engine(models["llama"].folder)
    with pytest.raises(RequestError):
        llm.generate({"prompt_embeds": values}, GREEDY)
    assert len(llm.generate({"prompt_token_ids": [1]}, GREEDY)) == 1


@pytest.mark.parametrize("change", [{"prompt_logprobs": 1}, {"repetition_penalty": 1.2}])
def test_what_looks_at_tokens_is_refused(engine: Engine, models: Models, change: dict[str, Any]) -> None:
    tiny = models["llama"]
    with pytest.raises(RequestError, match="needs the tokens of the prompt") as caught:
        engine(tiny.folder).generate({"prompt_embeds": embeddings(tiny, [1, 2])}, SamplingParams(**change))
    assert caught.value.field == f"sampling_params.{next(iter(change))}"
