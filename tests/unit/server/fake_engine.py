"""An engine that says what a test tells it to: real prompts, texts and log probabilities, and no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from fastapi import FastAPI
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jackfield.config import EngineConfig, load_config
from jackfield.engine.input_processor import InputProcessor, ProcessorLimits, Prompt
from jackfield.engine.output_processor import OutputProcessor
from jackfield.engine.outputs import RequestOutput
from jackfield.errors import JackfieldError
from jackfield.metrics import EngineMetrics
from jackfield.protocol import CoreEvent, EngineCoreOutput, EngineCoreRequest, FinishReason, SamplingParams
from jackfield.protocol.requests import TokenLogprobs
from jackfield.server.app import build_app
from jackfield.tokenizer import Tokenizer

END, START = 256, 257
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """Return a tokenizer whose ids below 256 are bytes; 256 ends a text, 257 is ``<s>``."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_in = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    raw = Backend(models.BPE(vocab={stand_in[byte]: byte for byte in range(256)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<end>", "<s>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", chat_template=template))


class FakeEngine:
    """Writes one answer for every request.

    Args:
        answer: text or ids. fail_after: raise an error after this many steps. steps: tokens in each step, repeated.
        forever: start the answer again and again.
    """

    def __init__(
        self,
        answer: str | Sequence[int] = "Hello",
        *,
        template: str | None = TEMPLATE,
        max_model_len: int = 256,
        fail_after: int | None = None,
        error: Exception | None = None,
        steps: Sequence[int] = (1,),
        forever: bool = False,
        **settings: Any,
    ) -> None:
        self.config = load_config(api={"model": "fake/model", **settings}, env={})
        self.tokenizer = byte_tokenizer(template)
        self.max_model_len, self.vocab_size, self.is_running = max_model_len, 258, True
        self.answer = [*answer.encode(), END] if isinstance(answer, str) else list(answer)
        self.fail_after, self.error, self.steps, self.forever = fail_after, error, steps, forever
        self.defaults: dict[str, Any] = {}
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.priorities: list[int] = []
        self.salts: list[str] = []
        self.living: set[str] = set()
        self.routes: Callable[[FastAPI], None] = lambda app: None
        limits = ProcessorLimits(vocab_size=258, max_model_len=max_model_len, eos_token_ids=(END,))
        self._inputs, self._outputs = InputProcessor(self.tokenizer, limits), OutputProcessor(self.tokenizer)

    @property
    def report(self) -> Any:
        class Report:
            def to_dict(self) -> dict[str, Any]:
                return {"decisions": ["chosen"]}

        return Report()

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        return self.defaults

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        return SamplingParams(**{**self.defaults, **changes})

    def metrics(self) -> EngineMetrics:
        return EngineMetrics(running=len(self.living), waiting=2)

    def add_routes(self, app: Any, allowed: tuple[str, ...]) -> None:
        self.routes(app)

    async def abort(self, request_id: str) -> None:
        self.living.discard(request_id)

    async def shutdown(self) -> None:
        self.is_running = False

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        assert sampling_params is not None and request_id is not None
        processed = self._inputs.prompt(prompt)
        requests = self._inputs.requests(request_id, processed, sampling_params, priority)
        self.prompts.append(processed.ids)
        self.params.append(sampling_params)
        self.priorities.append(priority)
        self.salts.append(processed.cache_salt)
        self._outputs.add(request_id, processed.text, requests)
        self.living.add(request_id)
        try:
            async for output in self._run(requests):
                yield output
        finally:
            self.living.discard(request_id)

    async def _run(self, requests: list[EngineCoreRequest]) -> AsyncIterator[RequestOutput]:
        done, step = 0, 0
        while True:
            if self.fail_after == step:
                raise self.error or JackfieldError("the engine broke")
            size = self.steps[step % len(self.steps)]
            events = [self._event(request, done, size) for request in requests]
            done, step = done + size, step + 1
            for output in self._outputs.process(EngineCoreOutput(events))[0]:
                yield output
                if output.finished:
                    return
            await asyncio.sleep(0.0005 if self.forever else 0)

    def _event(self, request: EngineCoreRequest, done: int, size: int) -> CoreEvent:
        last = request.max_tokens if self.forever else min(request.max_tokens, len(self.answer))
        ids, finish = [self.answer[i % len(self.answer)] for i in range(done, min(done + size, last))], None
        if END in ids and END in request.eos_token_ids:
            ids, finish = ids[: ids.index(END) + 1], FinishReason.STOP
        elif done + size >= last:
            finish = FinishReason.LENGTH
        params = request.sampling_params
        logprobs = [scores(token) for token in ids] if params.logprobs is not None else None
        scored = None
        if params.prompt_logprobs is not None and done == 0:
            scored = [scores(token) for token in request.prompt_token_ids[1:]]
        return CoreEvent(request.request_id, ids, finish, None, logprobs, scored, cached_tokens=3)


def scores(token: int) -> TokenLogprobs:
    """Return log probabilities in which ``token`` is the second of three."""
    return TokenLogprobs([token, 65, token, 66], [-1.0, -0.5, -1.0, -2.0], 2)


def make_app(engine: FakeEngine, **settings: Any) -> FastAPI:
    """Return the server of an engine, with settings by their dotted names or short ones."""
    config: EngineConfig = load_config(api={"model": "fake/model", **settings}, env={})
    return build_app(engine, config)


@asynccontextmanager
async def client(engine: FakeEngine, **settings: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of a server in this process."""
    transport = httpx2.ASGITransport(make_app(engine, **settings), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http


def post(engine: FakeEngine, path: str, body: Any, **settings: Any) -> httpx2.Response:
    """Send one request to a fresh server and return its answer."""

    async def send() -> httpx2.Response:
        async with client(engine, **settings) as http:
            if isinstance(body, bytes):
                return await http.post(path, content=body, headers={"content-type": "application/json"})
            return await http.post(path, json=body)

    return asyncio.run(asyncio.wait_for(send(), 60))


def get(engine: FakeEngine, path: str, **settings: Any) -> httpx2.Response:
    """Get one page of a fresh server."""

    async def send() -> httpx2.Response:
        async with client(engine, **settings) as http:
            return await http.get(path)

    return asyncio.run(asyncio.wait_for(send(), 60))


def say(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """Return a chat request."""
    return {"messages": [{"role": "user", "content": text}], **fields}
