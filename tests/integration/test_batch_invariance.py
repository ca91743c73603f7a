"""``batch_invariant``: to the last bit, a request's numbers do not depend on what is computed beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Engine, Models, check_idle
from hf import Tiny, assert_equal, make_tiny, random_prompts
from speculation_drafters import Knowing

from jackfield import LLM, PoolingParams, SamplingParams
from jackfield.errors import JackfieldError
from jackfield_native.toolchain import unavailable

PROMPTS = random_prompts([1, 7, 40, 90, 23, 61], seed=4)
WITH_LOGPROBS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5, prompt_logprobs=2)
MODES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "chunks of 33, overlapped": {"max_num_batched_tokens": 33, "async_scheduling": True},
    "few blocks": {"num_blocks": 9, "max_model_len": 104},
    "drafts": {
        "plugins": [Knowing],
        "speculative.method": "knowing",
        "speculative.num_speculative_tokens": 3,
        "speculative.adaptive": False,
    },
}
pytestmark = pytest.mark.skipif(unavailable() is not None, reason="the kernels in C cannot be built here")


def numbers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """Return all tokens and log probabilities of requests that run together."""
    found = []
    for request in llm.generate(prompts, WITH_LOGPROBS):
        output = request.outputs[0]
        rows = [*(request.prompt_logprobs or ()), *(output.logprobs or ())]
        found.append((output.token_ids, [row and {token: one.logprob for token, one in row.items()} for row in rows]))
    check_idle(llm)
    return found


def invariant(engine: Engine, tiny: Tiny, **settings: Any) -> LLM:
    return engine(tiny.folder, batch_invariant=True, block_size=16, **settings)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_every_bit_is_as_alone(engine: Engine, models: Models, kind: str, mode: str) -> None:
    tiny = models[kind]
    alone = invariant(engine, tiny, enable_prefix_caching=False)
    expected = [numbers(alone, [prompt])[0] for prompt in PROMPTS]
    Knowing.texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(PROMPTS, expected, strict=True)]
    llm = invariant(engine, tiny, **MODES[mode])
    assert numbers(llm, PROMPTS) == expected
    assert numbers(llm, PROMPTS[::-1]) == expected[::-1]  # now with what the prefix cache has
    assert_equal(tiny.model, PROMPTS, [tokens for tokens, _ in expected])
    metrics = llm.get_metrics()
    assert mode != "drafts" or metrics.drafts_proposed - 20 > metrics.drafts_accepted > 20, "kept and refused ones"


def test_vectors_are_as_alone(engine: Engine, models: Models) -> None:
    params = PoolingParams(task="token_embed", normalize=False)
    alone = invariant(engine, models["qwen3"], task="pool")
    llm = invariant(engine, models["qwen3"], task="pool", max_num_batched_tokens=11, max_num_seqs=3)
    expected = [alone.encode([prompt], params)[0].data for prompt in PROMPTS]
    for output, vectors in zip(llm.encode(PROMPTS, params), expected, strict=True):
        assert np.array_equal(output.data, vectors)


def test_it_is_a_need_that_the_report_shows(engine: Engine, models: Models) -> None:
    llm = invariant(engine, models["llama"])
    chosen = {decision.family: decision for decision in llm.report.decisions}
    assert chosen["attention_backends"].plugin.name == "native_cpu"
    assert chosen["quantization_methods"].plugin.name == "native_dense"
    assert "batch_invariant" in llm.report.render()
    with pytest.raises(JackfieldError, match="batch_invariant"):
        invariant(engine, models["llama"], **{"attention.force": "torch_sdpa"})


def test_a_model_that_no_plugin_promises_it_for_is_refused(engine: Engine, tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, "llama")
    with pytest.raises(JackfieldError, match="batch_invariant"):
        invariant(engine, tiny, dtype="bfloat16")
