"""Hidden states become vectors: against the hidden states of the reference, pooled by hand."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import Engine, Models
from hf import Tiny, random_prompts
from text_model import add_tokenizer

from jackfield import LLM, AsyncLLM, PoolingParams
from jackfield.checkpoint import pooling_defaults
from jackfield.errors import CheckpointError, RequestError

PROMPTS = random_prompts([1, 5, 17, 40, 90], seed=4)
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "overlapped": {"async_scheduling": True, "max_num_batched_tokens": 31},
    "no prefix cache": {"enable_prefix_caching": False},
}


@torch.no_grad()
def hidden_states(tiny: Tiny, prompt: list[int]) -> torch.Tensor:
    """Return the reference's final hidden states [N, E]."""
    states: torch.Tensor = tiny.model.model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
    return states


def by_hand(tiny: Tiny, prompt: list[int], params: PoolingParams) -> torch.Tensor:
    states = hidden_states(tiny, prompt)
    if params.per_token:
        vector = states
    else:
        vector = {"cls": states[0], "last": states[-1], "mean": states.mean(0), None: states[-1]}[params.method]
    vector = vector[..., : params.dimensions]
    return vector if params.normalize is False else vector / vector.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(
    "params",
    [
        PoolingParams(),
        PoolingParams(method="mean"),
        PoolingParams(method="cls", normalize=False),
        PoolingParams(method="mean", dimensions=24),
        PoolingParams(task="token_embed", normalize=False),
        PoolingParams(task="token_embed", dimensions=8),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", MODES)
def test_vectors_are_the_references(engine: Engine, models: Models, mode: str, params: PoolingParams) -> None:
    tiny = models["qwen3"]
    llm = engine(tiny.folder, task="pool", **MODES[mode])
    for _ in range(2):  # the second time with what the prefix cache has of the first
        for prompt, output in zip(PROMPTS, llm.encode(PROMPTS, params), strict=True):
            expected = by_hand(tiny, prompt, params)
            assert output.data.dtype == np.float32 and output.prompt_token_ids == prompt
            torch.testing.assert_close(torch.from_numpy(output.data.copy()), expected, atol=2e-5, rtol=2e-5)


def test_only_the_last_state_may_come_from_the_prefix_cache(engine: Engine, models: Models) -> None:
    llm = engine(models["qwen3"].folder, task="pool", block_size=16)
    long = [PROMPTS[-1]]
    llm.encode(long)
    assert llm.encode(long)[0].num_cached_tokens == 80
    assert llm.encode(long, PoolingParams(method="mean"))[0].num_cached_tokens == 0


def test_a_prompt_may_fill_the_whole_context(engine: Engine, models: Models) -> None:
    llm = engine(models["llama"].folder, task="pool", max_model_len=90)
    assert len(llm.embed([PROMPTS[-1]])) == 1
    with pytest.raises(RequestError, match="the prompt has 91 tokens"):
        llm.embed([[*PROMPTS[-1], 1]])


def test_scores_are_cosines(tmp_path: Path, text_model: Tiny) -> None:
    llm = LLM(str(text_model.folder), task="pool", kv_cache_memory="4MiB")
    texts = ["one", "two and more"]
    vectors = [torch.from_numpy(output.data.copy()) for output in llm.embed(texts, normalize=False)]
    expected = float(torch.cosine_similarity(vectors[0], vectors[1], dim=0))
    assert llm.score("one", ["two and more", "one"]) == pytest.approx([expected, 1.0], abs=1e-5)
    with pytest.raises(RequestError, match="2 texts cannot be paired with 3"):
        llm.score(["a", "b"], ["a", "b", "c"])


def test_the_engine_process_gives_the_same(models: Models) -> None:
    async def run() -> list[np.ndarray[Any, Any]]:
        llm = await AsyncLLM.start(
            str(models["qwen3"].folder), task="pool", skip_tokenizer_init=True, kv_cache_memory="4MiB"
        )
        try:
            outputs = await asyncio.gather(*(llm.encode(prompt) for prompt in PROMPTS))
            with pytest.raises(RequestError, match="generates no text"):
                async for _ in llm.generate(PROMPTS[0]):
                    pass
        finally:
            await llm.shutdown()
        return [output.data for output in outputs]

    for prompt, data in zip(PROMPTS, asyncio.run(run()), strict=True):
        expected = by_hand(models["qwen3"], prompt, PoolingParams())
        torch.testing.assert_close(torch.from_numpy(data.copy()), expected, atol=2e-5, rtol=2e-5)


def test_what_cannot_be_had_is_refused(engine: Engine, models: Models) -> None:
    pooling = engine(models["llama"].folder, task="pool")
    generating = engine(models["llama"].folder)
    with pytest.raises(RequestError, match="the engine makes vectors and generates no text"):
        pooling.generate([[1, 2]])
    with pytest.raises(RequestError, match="the engine generates text and makes no vectors"):
        generating.encode([[1, 2]])
    with pytest.raises(RequestError, match="the model has no labels to score"):
        pooling.classify([[1, 2]])
    with pytest.raises(RequestError, match="the model's embeddings have 64 dimensions") as caught:
        pooling.embed([[1, 2]], dimensions=65)
    assert caught.value.field == "pooling_params.dimensions"
    for wrong in ({"task": "score"}, {"method": "max"}, {"dimensions": 0}, {"task": "classify", "normalize": True}):
        with pytest.raises(RequestError):
            PoolingParams(**wrong)  # type: ignore[arg-type]
    assert len(pooling.embed([[1, 2]])) == 1, "the engine goes on"


def write_modules(folder: Path, pooling: dict[str, Any], *more: str) -> None:
    kinds = ["Transformer", "Pooling", *more]
    modules = [{"idx": i, "name": str(i), "path": f"{i}_{k}", "type": f"st.models.{k}"} for i, k in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_a_checkpoint_says_how_it_pools(tmp_path: Path) -> None:
    assert pooling_defaults(tmp_path) is None
    write_modules(tmp_path, {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True}, "Normalize")
    found = pooling_defaults(tmp_path)
    assert found is not None and (found.method, found.normalize) == ("mean", True)
    write_modules(tmp_path, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    found = pooling_defaults(tmp_path)
    assert found is not None and (found.method, found.normalize) == ("cls", False)
    write_modules(tmp_path, {"pooling_mode": "lasttoken"})
    found = pooling_defaults(tmp_path)
    assert found is not None and found.method == "last"
    write_modules(tmp_path, {"pooling_mode_max_tokens": True})
    with pytest.raises(CheckpointError, match="pools in a way that is not supported"):
        pooling_defaults(tmp_path)
    write_modules(tmp_path, {"pooling_mode_cls_token": True}, "LSTM")
    with pytest.raises(CheckpointError, match="a module of type LSTM"):
        pooling_defaults(tmp_path)


def test_the_way_of_pooling_comes_from_the_checkpoint(engine: Engine, tmp_path: Path, models: Models) -> None:
    tiny = models["llama"]
    tiny.model.save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    write_modules(tmp_path, {"pooling_mode_mean_tokens": True})
    output = engine(tmp_path, task="pool").embed([PROMPTS[2]])[0]
    expected = by_hand(tiny, PROMPTS[2], PoolingParams(method="mean", normalize=False))
    torch.testing.assert_close(torch.from_numpy(output.data.copy()), expected, atol=2e-5, rtol=2e-5)
