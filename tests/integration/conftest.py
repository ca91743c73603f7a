"""Engines that are checked for leaks after every test, and tiny models that a session makes once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf import LLAMA3_ROPE, TOTAL, WINDOW, Tiny, make_tiny
from text_model import add_tokenizer

from jackfield import LLM
from jackfield_native.toolchain import unavailable

TINY: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama"},
    "llama_tied": {"kind": "llama", "tie_word_embeddings": True},
    "llama_shards": {"kind": "llama", "shard": "200KB"},
    "llama_biases": {"kind": "llama", "attention_bias": True, "mlp_bias": True},
    "llama_rope": {"kind": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama_mha": {"kind": "llama", "num_key_value_heads": 4, "head_dim": 24, "tie_word_embeddings": True},
    "mistral": {"kind": "mistral", "sliding_window": WINDOW, "head_dim": 16},
    "qwen2": {
        "kind": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "qwen3": {"kind": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
}
"""Names of tiny models, and what :func:`hf.make_tiny` makes them from."""

Engine = Callable[..., LLM]

CPU_ATTENTION = "torch_sdpa" if unavailable() else "native_cpu"
CPU_OPS = "torch" if unavailable() else "native+torch"
"""What is chosen on a CPU: kernels in C, where there is a compiler."""


class Models:
    """Makes each tiny model when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, Tiny] = {}

    def __getitem__(self, name: str) -> Tiny:
        if name not in self._made:
            self._made[name] = make_tiny(self._root / name, **TINY[name])
        return self._made[name]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny Llama with a tokenizer of bytes: id 0 to 255 is a byte, 256 the end of a text."""
    tiny = make_tiny(tmp_path_factory.mktemp("text"), "llama", eos_token_id=256)
    add_tokenizer(tiny.folder)
    return tiny


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices gain little from threads, and threads that wait for each other on a busy machine lose much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep settings of the developer's own environment out."""
    monkeypatch.setattr("jackfield.config.load.process_environment", dict)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Start engines on token ids; after the test each must hold nothing: no slot, no block, no request."""
    started: list[LLM] = []

    def start(model: Path, **settings: Any) -> LLM:
        defaults = {"skip_tokenizer_init": True, "max_num_seqs": 16, "kv_cache_memory": "16MiB"}
        llm = LLM(str(model), **{**defaults, **settings})
        started.append(llm)
        return llm

    yield start
    for llm in started:
        check_idle(llm)
        llm.shutdown()


def check_idle(llm: LLM) -> None:
    """Run what is left of aborted requests, then fail if anything is still held."""
    while llm._core.has_work():
        llm._advance()
    llm._core.scheduler.check_idle()
    assert llm._outputs.num_requests() == 0
    assert not llm._streams and not llm._done, "outputs are left that nobody waits for"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tokens were held against the reference, and how many of them counted as equal by a tie."""
    if TOTAL.tokens:
        terminalreporter.write_line(f"{TOTAL.tokens} tokens compared with the reference, {TOTAL.ties} of them tied")
