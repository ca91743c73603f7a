"""OutputProcessor: from events of the engine core to outputs: text, stop strings, log probabilities."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jackfield.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jackfield.engine.stop_strings import StopScanner
from jackfield.protocol import CoreEvent, EngineCoreOutput, EngineCoreRequest, FinishReason, OutputKind, SamplingParams
from jackfield.protocol.requests import TokenLogprobs
from jackfield.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(slots=True)
class CompletionState:
    """One completion under way. ``told_text`` and ``told_ids`` say how much a delta stream has given out."""

    index: int
    params: SamplingParams
    scanner: StopScanner
    detokenizer: IncrementalDetokenizer | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    total_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str = ""
    told_text: int = 0
    told_ids: int = 0


@dataclass(slots=True)
class RequestState:
    """A request under way."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    completions: list[CompletionState]
    metrics: RequestMetrics
    cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    pooled: npt.NDArray[np.float32] | None = None

    @property
    def finished(self) -> bool:
        """Whether all completions are over."""
        return all(c.finish_reason is not None for c in self.completions)


class OutputProcessor:
    """Keeps the text side of all living requests."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, RequestState] = {}
        self._owner: dict[str, tuple[RequestState, int]] = {}
        self._texts: dict[int, str] = {}

    def add(self, request_id: str, prompt: str | None, requests: list[EngineCoreRequest]) -> None:
        """Follow a request and its completions."""
        first = requests[0]
        state = RequestState(
            request_id,
            prompt,
            first.prompt_token_ids,
            first.sampling_params,
            [self._completion(i, r) for i, r in enumerate(requests)],
            RequestMetrics(time.monotonic()),
        )
        self._requests[request_id] = state
        for index, request in enumerate(requests):
            self._owner[request.request_id] = (state, index)

    def core_ids(self, request_id: str) -> list[str]:
        """Return the core requests that belong to a request; empty when it is unknown or over."""
        return [core for core, (state, _) in self._owner.items() if state.request_id == request_id]

    def process(self, output: EngineCoreOutput) -> tuple[list[RequestOutput], list[str]]:
        """Return outputs of the requests that have news, and core requests to abort because a stop string was found."""
        touched: dict[str, RequestState] = {}
        to_abort = []
        for event in output.events:
            owner = self._owner.get(event.request_id)
            if owner is None:
                continue
            state, index = owner
            if self._apply(state, state.completions[index], event):
                to_abort.append(event.request_id)
            if state.completions[index].finish_reason is not None:
                del self._owner[event.request_id]
            touched[state.request_id] = state
        outputs = [self._output(state) for state in touched.values() if self._has_news(state)]
        for request_id, state in touched.items():
            if state.finished:
                del self._requests[request_id]
        return outputs, to_abort

    def forget(self, request_id: str) -> None:
        """Follow a request no longer; nothing will come of it."""
        if self._requests.pop(request_id, None) is not None:
            self._owner = {core: owner for core, owner in self._owner.items() if owner[0].request_id != request_id}

    def num_requests(self) -> int:
        """Return how many requests are followed."""
        return len(self._requests)

    def _completion(self, index: int, request: EngineCoreRequest) -> CompletionState:
        params = request.sampling_params
        detokenizer = None
        if self._tokenizer is not None and params.detokenize:
            detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                request.prompt_token_ids,
                params.skip_special_tokens,
                params.spaces_between_special_tokens,
            )
        scanner = StopScanner(params.stops, keep=params.include_stop_str_in_output)
        logprobs: list[dict[int, Logprob]] | None = [] if params.logprobs is not None else None
        return CompletionState(index, params, scanner, detokenizer, logprobs=logprobs)

    def _apply(self, state: RequestState, completion: CompletionState, event: CoreEvent) -> bool:
        """Take an event; returns True when a stop string ended the completion before the core knew."""
        now = time.monotonic()
        if event.token_ids:
            state.metrics.first_token = state.metrics.first_token or now
            state.metrics.last_token = now
        if state.params.prompt_logprobs is not None and state.prompt_logprobs is None and event.token_ids:
            state.prompt_logprobs = [None, *(self._logprobs(entry) for entry in event.prompt_logprobs or ())]
        if event.pooled is not None:
            state.pooled = np.frombuffer(event.pooled.data, dtype="<f4").reshape(event.pooled.shape)
        if event.scheduled is not None:
            state.metrics.scheduled = min(event.scheduled, state.metrics.scheduled or event.scheduled)
        rounds, proposed, accepted = event.drafts
        state.metrics.draft_rounds += rounds
        state.metrics.drafts_proposed += proposed
        state.metrics.drafts_accepted += accepted
        state.cached_tokens = max(state.cached_tokens, event.cached_tokens)
        for place, token in enumerate(event.token_ids):
            completion.token_ids.append(token)
            if event.logprobs is not None and completion.logprobs is not None:
                completion.logprobs.append(self._logprobs(event.logprobs[place]))
                completion.total_logprob += event.logprobs[place].values[0]
            stop = self._push_text(completion, token, event)
            if stop is not None:
                self._end(completion, FinishReason.STOP.text, stop)
                return event.finish is None
        if event.finish is not None:
            if completion.detokenizer is not None:
                stop = completion.scanner.push(completion.detokenizer.flush())
                if stop is not None:
                    self._end(completion, FinishReason.STOP.text, stop)
                    return False
            self._end(completion, event.finish.text, event.stop_reason)
            completion.error = event.error
        return False

    def _push_text(self, completion: CompletionState, token: int, event: CoreEvent) -> str | None:
        if completion.detokenizer is None:
            return None
        by_id = event.finish is FinishReason.STOP and not isinstance(event.stop_reason, str)
        last = by_id and token == event.token_ids[-1]
        if last and not completion.params.include_stop_str_in_output and completion.params.skip_special_tokens:
            # The token that ended the output is no part of its text.
            return None
        armed = len(completion.token_ids) > completion.params.min_tokens
        return completion.scanner.push(completion.detokenizer.push([token]), armed=armed)

    def _end(self, completion: CompletionState, reason: str, stop: int | str | None) -> None:
        completion.scanner.finish()
        completion.finish_reason = reason
        completion.stop_reason = stop

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        found: dict[int, Logprob] = {}
        for place, (token, value) in enumerate(zip(entry.token_ids, entry.values, strict=True)):
            rank = entry.rank if place == 0 else place
            text = self._text(token)
            found.setdefault(token, Logprob(value, rank, text))
        return found

    def _text(self, token: int) -> str | None:
        """Return a token's text, decoded once."""
        if self._tokenizer is None:
            return None
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return self._texts[token]

    def _has_news(self, state: RequestState) -> bool:
        return state.finished or state.params.output_kind is not OutputKind.FINAL_ONLY

    def _output(self, state: RequestState) -> RequestOutput:
        delta = state.params.output_kind is OutputKind.DELTA
        return RequestOutput(
            state.request_id,
            state.prompt,
            state.prompt_token_ids,
            [_render(c, delta=delta) for c in state.completions],
            state.finished,
            state.metrics,
            state.cached_tokens,
            state.prompt_logprobs,
            state.pooled,
        )


def _render(completion: CompletionState, *, delta: bool) -> CompletionOutput:
    text = completion.scanner.text[: completion.scanner.safe]
    ids, logprobs = completion.token_ids, completion.logprobs
    if delta:
        text_from, ids_from = completion.told_text, completion.told_ids
        completion.told_text, completion.told_ids = len(text), len(ids)
        text, ids = text[text_from:], ids[ids_from:]
        logprobs = None if logprobs is None else logprobs[ids_from:]
    return CompletionOutput(
        completion.index,
        text,
        list(ids),
        completion.total_logprob if completion.logprobs is not None else None,
        None if logprobs is None else list(logprobs),
        completion.finish_reason,
        completion.stop_reason,
        completion.error,
    )
