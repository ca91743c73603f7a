"""Requests of several APIs, their events, and an engine that makes vectors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import numpy as np
from fake_engine import FakeEngine

from jackfield.engine.input_processor import InputProcessor, ProcessorLimits, Prompt
from jackfield.engine.outputs import PoolingOutput
from jackfield.interfaces import PoolerConfig
from jackfield.protocol import PoolingParams

MESSAGES, COUNT, RESPONSES, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TOOLS = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}"
    "{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}{{ m['tool_call_id'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
"""A template that knows tools and thinking."""


def message(**fields: Any) -> dict[str, Any]:
    """Return a request of the Messages API."""
    return {"max_tokens": 50, "messages": HI, **fields}


def named_events(response: httpx2.Response) -> list[dict[str, Any]]:
    """Return the events of a stream; the name of each is its type."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    return [named_event(block) for block in blocks]


def named_event(block: str) -> dict[str, Any]:
    name, data = block.split("\n")
    event: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert name == f"event: {event['type']}"
    return event


def prompt_of(engine: FakeEngine) -> str:
    """Return the last prompt that an engine got, with ``<s>`` for its token 257."""
    return "".join("<s>" if token == 257 else chr(token) for token in engine.prompts[-1])


def run(test: Callable[[], Awaitable[None]], seconds: float = 20) -> None:
    asyncio.run(asyncio.wait_for(test(), seconds))


class PoolEngine(FakeEngine):
    """Makes vectors that tell what it got: [first id, number of ids, 1].

    Args:
        together: answer only once so many requests are there.
    """

    labels = 0
    late_interaction = False
    token_types = 0

    def __init__(self, together: int = 1, **settings: Any) -> None:
        super().__init__(task="pool", **settings)
        limits = ProcessorLimits(258, self.max_model_len, (), pooler=PoolerConfig())
        self._pool_inputs = InputProcessor(self.tokenizer, limits)
        self._together, self._enough = together, asyncio.Event()
        self.pooling: list[PoolingParams] = []
        self.ended = 0

    async def encode(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, request_id: str = "", *, priority: int = 0
    ) -> PoolingOutput:
        assert pooling_params is not None
        ids = self._pool_inputs.prompt(prompt).ids
        self.prompts.append(ids)
        self.pooling.append(pooling_params)
        self.priorities.append(priority)
        self.living.add(request_id)
        try:
            if len(self.living) == self._together:
                self._enough.set()
            await self._enough.wait()
        finally:
            self.living.discard(request_id)
            self.ended += 1
        data = np.array([ids[0], len(ids), 1], np.float32)
        if pooling_params.per_token:
            data = np.array([[token, 0.5] for token in ids], np.float32)
        return PoolingOutput(request_id, ids, data)
