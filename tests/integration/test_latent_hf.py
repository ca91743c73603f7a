"""Multi-head latent attention against HF transformers: whole, in chunks, from a prefix, preempted, in mixed batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import Engine
from hf import assert_equal, random_prompts
from latent_models import GREEDY, RECIPES, cut_any_way
from test_models_hf import check_logprobs


@pytest.mark.parametrize("name", RECIPES)
def test_logits_and_tokens_equal_the_reference(engine: Engine, tmp_path: Path, name: str) -> None:
    tiny = RECIPES[name].make(tmp_path)
    llm = engine(tiny.folder, block_size=8, long_prefill_token_threshold=7, max_num_seqs=8)
    check_logprobs(llm, tiny, random_prompts((40,), seed=3)[0])
    prompts = random_prompts((1, 3, 16, 70))
    batch = [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)]
    assert [len(output) for output in batch] == [32] * len(prompts)
    assert_equal(tiny.model, prompts, batch)


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_chunks_prefixes_and_preemption_change_nothing(engine: Engine, tmp_path: Path, chunk: int) -> None:
    tiny = RECIPES["v2-dense"].make(tmp_path)
    # Parts of the context smaller than a chunk, so that they are merged.
    parts = {"torch_mla": {"context_part": 11}}
    cut_any_way(engine, tiny, chunk, parts)
