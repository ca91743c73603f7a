"""Caches in fewer bits, through the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import Engine
from hf import Tiny, continuation_logits, make_tiny, random_prompts
from latent_models import RECIPES

from jackfield import LLM, SamplingParams
from jackfield.errors import JackfieldError

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = random_prompts((40,), seed=4)[0]


def error(llm: LLM, tiny: Tiny) -> float:
    """Return the largest difference of a log probability from the reference's, at any place of a prompt."""
    (request,) = llm.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=-1))
    expected = continuation_logits(tiny.model, PROMPT[:1], PROMPT[1:]).log_softmax(dim=-1)
    assert request.prompt_logprobs is not None
    found = [
        [entry[token].logprob for token in range(expected.shape[1])] for entry in request.prompt_logprobs[1:] if entry
    ]
    return float((torch.tensor(found) - expected).abs().max())


@pytest.mark.parametrize("chunk", [0, 7])
def test_fewer_bits_cost_more_accuracy(engine: Engine, tmp_path: Path, chunk: int) -> None:
    tiny = make_tiny(tmp_path, "llama")
    shared = {"block_size": 8, "long_prefill_token_threshold": chunk}
    kinds = ("auto", "int8", "fp8", "fp8_e5m2", "int4")
    errors = {kind: error(engine(tiny.folder, cache_dtype=kind, **shared), tiny) for kind in kinds}
    assert errors["auto"] < 1e-4
    assert errors["auto"] * 10 < errors["int8"] < errors["fp8"] < errors["fp8_e5m2"] < errors["int4"] < 10.0


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_prefixes_batches_and_preemption_change_nothing(engine: Engine, tmp_path: Path, kind: str) -> None:
    tiny = make_tiny(tmp_path, "llama")
    llm = engine(tiny.folder, cache_dtype=kind, block_size=8)
    prompts = random_prompts((40, 17, 33, 60, 5), seed=9)
    alone = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    again = llm.generate(prompts, GREEDY)
    assert [request.outputs[0].token_ids for request in again] == alone
    assert again[0].num_cached_tokens == 32
    small = engine(tiny.folder, cache_dtype=kind, block_size=8, num_blocks=16, max_model_len=100)
    assert [request.outputs[0].token_ids for request in small.generate(prompts, GREEDY)] == alone


@pytest.mark.parametrize(("word", "kind"), [("int8_per_token_head", "int8"), ("fp8_e4m3", "fp8")])
def test_other_words_for_types(engine: Engine, tmp_path: Path, word: str, kind: str) -> None:
    tiny = make_tiny(tmp_path, "llama")
    found, wanted = (error(engine(tiny.folder, cache_dtype=name), tiny) for name in (word, kind))
    assert found == wanted > 1e-4


def test_layers_can_have_types_of_their_own(engine: Engine, tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, "llama")
    plain, narrow = (error(engine(tiny.folder, cache_dtype=kind), tiny) for kind in ("auto", "int4"))
    mixed = engine(tiny.folder, cache_dtype="int4", **{"cache.layer_dtypes": {"0-1": "auto"}})
    assert plain * 10 < error(mixed, tiny) < narrow
    same = engine(tiny.folder, **{"cache.layer_dtypes": {"layers.*.attention": "int4"}})
    assert error(same, tiny) == pytest.approx(narrow, rel=1e-3)
    with pytest.raises(JackfieldError, match=r"cache.layer_dtypes names '7', which matches no layer"):
        engine(tiny.folder, **{"cache.layer_dtypes": {"7": "int8"}})


def test_latents_in_8_bit_floats(engine: Engine, tmp_path: Path) -> None:
    tiny = RECIPES["v2-lite-dense"].make(tmp_path)
    exact, narrow = (error(engine(tiny.folder, cache_dtype=kind, block_size=8), tiny) for kind in ("auto", "fp8"))
    assert exact < 1e-4 and narrow > 1e-3
    with pytest.raises(JackfieldError, match="int8 is no type that latents can be stored in"):
        engine(tiny.folder, cache_dtype="int8")
