"""Every family of mixing and of experts against HF transformers, cut in every way: prompts whole and in chunks of 1, 7
and 64, from prefixes of the cache, in mixed batches, and preempted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import Engine
from hf import Tiny, assert_equal, random_prompts
from latent_models import RECIPES as LATENT
from moe_models import MOE_RECIPES
from test_moe_hf import biased
from test_recurrent_hf import make
from tiny_models import RECIPES, Recipe

from jackfield import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
WHOLE = 512
CHUNKS = (1, 7, 64, WHOLE)
MODELS: dict[str, Recipe] = {
    **{name: LATENT[name] for name in ("v2", "v3")},
    **{name: RECIPES[name] for name in ("gemma2", "gemma3")},
    **{
        name: MOE_RECIPES[name]
        for name in (
            *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe", "phimoe", "llama4"),
            *("glm4_moe", "ernie4_5_moe"),
        )
    },
}
STATES = ("mamba", "mamba2", "falcon-mamba", "jamba", "zamba2", "bamba", "granite-hybrid", "qwen3-next", "minimax")
ALONE, WINDOWS = ("mamba", "mamba2", "falcon-mamba"), ("gemma2", "gemma3", "gpt_oss")
OTHERS = {"llama4": 26}
NAMES = (*MODELS, *STATES)
QUICK = {(name, CHUNKS[at % len(CHUNKS)]) for at, name in enumerate(NAMES)}
CASES = [
    pytest.param(name, chunk, marks=() if (name, chunk) in QUICK else pytest.mark.slow)
    for name in NAMES
    for chunk in CHUNKS
]


def tiny_of(name: str, folder: Path) -> Tiny:
    """Make a model whose parts all do something."""
    return make(name, folder) if name in STATES else biased(MODELS[name].make(folder))


def few_blocks(name: str, chunk: int) -> int:
    """Return blocks of a cache that holds one sequence of 96 tokens, and not all."""
    if name in ALONE:
        return 6
    if name in WINDOWS:
        return 24 if chunk < 64 else 30
    return OTHERS.get(name, 24 if name in STATES else 12)


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize(("name", "chunk"), CASES)
def test_no_cut_changes_a_token(engine: Engine, tmp_path: Path, name: str, chunk: int) -> None:
    tiny = tiny_of(name, tmp_path)
    llm = engine(tiny.folder, long_prefill_token_threshold=chunk, block_size=16, max_num_seqs=4)
    prompts = random_prompts((50, 90, 1, 17, 33))
    first = tokens(llm, prompts)
    assert_equal(tiny.model, prompts, first)
    longer = [[*prompt, *output, 5] for prompt, output in zip(prompts[:2], first[:2], strict=True)]
    again = llm.generate(longer, GREEDY)
    assert all((request.num_cached_tokens or 0) >= 48 for request in again)
    assert_equal(tiny.model, longer, [request.outputs[0].token_ids for request in again])
    small = engine(
        tiny.folder,
        block_size=16,
        num_blocks=few_blocks(name, chunk),
        kv_cache_memory=None,
        max_model_len=96,
        long_prefill_token_threshold=chunk,
    )
    many = random_prompts((40, 60, 30, 70, 20, 66), seed=9)
    assert_equal(tiny.model, many, tokens(small, many))
    assert small.get_metrics().preemptions > 0
