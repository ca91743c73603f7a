"""Latent attention to chosen tokens against HF transformers: whole, in chunks, from a prefix, preempted, in mixed
batches.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import Engine
from hf import Tiny, assert_equal, random_prompts
from latent_models import GREEDY, SPARSE, cut_any_way
from test_models_hf import check_logprobs


def differs_from_dense(tiny: Tiny, prompt: list[int]) -> bool:
    """Return whether it matters to the reference which tokens are chosen."""
    ids = torch.tensor([prompt])
    layers = [layer.self_attn.indexer for layer in tiny.model.model.layers]
    kept = [layer.index_topk for layer in layers]
    with torch.no_grad():
        some = tiny.model(ids).logits
        for layer in layers:
            layer.index_topk = len(prompt)
        every = tiny.model(ids).logits
    for layer, count in zip(layers, kept, strict=True):
        layer.index_topk = count
    return float((some - every).abs().max()) > 0.1


@pytest.mark.parametrize("name", SPARSE)
def test_logits_and_tokens_equal_the_reference(engine: Engine, tmp_path: Path, name: str) -> None:
    tiny = SPARSE[name].make(tmp_path)
    prompts = random_prompts((1, 3, 16, 70))
    assert differs_from_dense(tiny, prompts[-1]) == (name != "all chosen")
    llm = engine(tiny.folder, block_size=8, long_prefill_token_threshold=7, max_num_seqs=8)
    check_logprobs(llm, tiny, random_prompts((40,), seed=3)[0])
    batch = [request.outputs[0].token_ids for request in llm.generate(prompts, GREEDY)]
    assert [len(output) for output in batch] == [32] * len(prompts)
    assert_equal(tiny.model, prompts, batch)


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_chunks_prefixes_and_preemption_change_nothing(engine: Engine, tmp_path: Path, chunk: int) -> None:
    tiny = SPARSE["dense"].make(tmp_path)
    # Few numbers at once, so that rows are cut.
    parts = {"torch_mla_sparse": {"part_numbers": 9000, "context_part": 5}}
    cut_any_way(engine, tiny, chunk, parts)
