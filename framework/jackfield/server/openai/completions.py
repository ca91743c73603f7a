"""``/v1/completions``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from jackfield.engine.outputs import CompletionOutput, RequestOutput
from jackfield.errors import RequestError
from jackfield.protocol import SamplingParams
from jackfield.server import sse
from jackfield.server.generation import Generation, Job, Usage, begin, collect
from jackfield.server.openai import logprobs as lp
from jackfield.server.openai import params as build
from jackfield.server.openai.answers import ERRORS, Completion
from jackfield.server.openai.common import ChoiceStream, ChunkWriter, Head, finish, json_response, make_id
from jackfield.server.openai.types import CompletionRequest
from jackfield.server.openai.unknown import ignored_header, refuse_unserved
from jackfield.server.state import ServerState, state_of
from jackfield.server.text import check_room, encode, truncate

router = APIRouter(tags=["OpenAI"])
DEFAULT_MAX_TOKENS = 16
"""Tokens of a completion when the request does not say, as in OpenAI's API."""


@router.post("/v1/completions", response_model=Completion, responses=ERRORS)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several texts."""
    state = state_of(request)
    prompts = _prompts(body)
    _check(state, body, len(prompts))
    work = Work(state, body, [await _tokens(state, body, prompt) for prompt in prompts])
    if not body.stream:
        outputs = await collect(state.engine, work.jobs, request)
        return json_response(work.answer(outputs), ignored_header(body))
    generation = await begin(state.engine, work.jobs, request)
    stream = CompletionStream(generation, work, request.url.path)
    return sse.EventStream(stream.events(), ignored_header(body), generation.close)


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt: its ids, and its text where the request gave one and all of it is kept."""

    ids: list[int]
    text: str | None


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    prompt: Any = body.prompt
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)


def _check(state: ServerState, body: CompletionRequest, prompts: int) -> None:
    build.check_common(state, body)
    refuse_unserved(body)
    build.check_logprobs(state, "logprobs", body.logprobs)
    if body.suffix:
        raise RequestError("completions with a suffix are not supported", field="suffix", remedy="leave it out")
    n, best_of = body.n or 1, body.best_of or body.n or 1
    if best_of < n:
        raise RequestError(
            f"best_of must be at least n = {n}", field="best_of", value=best_of, remedy="raise best_of or lower n"
        )
    if body.stream and best_of != n:
        raise RequestError(
            "the best of several completions are known at the end only, so they cannot be streamed",
            field="best_of",
            value=best_of,
            remedy="set stream to false, or leave best_of out",
        )
    if prompts > 1 and prompts * best_of > build.MAX_CHOICES:
        field = "best_of" if body.best_of else "n"
        message = f"{prompts} prompts with {best_of} completions each are more than {build.MAX_CHOICES}"
        raise RequestError(message, field=field, value=best_of, remedy="send several requests")


async def _tokens(state: ServerState, body: CompletionRequest, prompt: str | list[int]) -> PromptTokens:
    engine = state.engine
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if isinstance(prompt, str):
        special = True if body.add_special_tokens is None else body.add_special_tokens
        given, text = await encode(engine, prompt, special=special, field="prompt"), prompt
    else:
        given, text = prompt, None
    ids = truncate(engine, given, body.truncate_prompt_tokens, max_tokens)
    check_room(engine, len(ids), body.max_tokens, field="prompt", limit_field="max_tokens")
    # Many prompts take long; others get their turn in between.
    await asyncio.sleep(0)
    return PromptTokens(ids, text if len(ids) == len(given) else None)


def _params(state: ServerState, body: CompletionRequest) -> SamplingParams:
    echoed = body.logprobs if body.echo else None
    wanted = [count for count in (echoed, body.prompt_logprobs) if count is not None]
    build.check_scored(body, body.max_tokens, scored=bool(wanted) or bool(body.echo), field="max_tokens")
    ranked = body.best_of is not None and body.best_of > (body.n or 1)
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = build.default_max_tokens(state.engine, DEFAULT_MAX_TOKENS)
    return build.sampling_params(
        state.engine,
        body,
        max_tokens=max_tokens,
        n=body.best_of,
        logprobs=0 if ranked and body.logprobs is None else body.logprobs,
        prompt_logprobs=max(wanted, default=None),
    )


class Work:
    """Completions under way: what their request wants in the answer."""

    def __init__(self, state: ServerState, body: CompletionRequest, prompts: list[PromptTokens]) -> None:
        self.body, self.prompts = body, prompts
        self.params = _params(state, body)
        self.n = body.n or 1
        self.scored = body.max_tokens == 0
        self.head = Head(
            id=make_id("cmpl", body),
            object="text_completion",
            model=state.check_model(body.model),
            fingerprint=state.fingerprint,
        )
        self.jobs = [self._job(place, prompt) for place, prompt in enumerate(prompts)]
        self.tokenizer = state.engine.tokenizer

    def _job(self, place: int, prompt: PromptTokens) -> Job:
        return Job(
            request_id=self.head.id if len(self.prompts) == 1 else f"{self.head.id}-{place}",
            prompt_ids=prompt.ids,
            params=self.params,
            cache_salt=self.body.cache_salt or "",
            priority=self.body.priority or 0,
        )

    def answer(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the whole answer."""
        usage, choices = Usage(), []
        for job, output in enumerate(outputs):
            usage.prompt += len(output.prompt_token_ids)
            usage.cached += output.num_cached_tokens
            if not self.scored:
                usage.completion += sum(len(completion.token_ids) for completion in output.outputs)
            for place, completion in enumerate(self._best(output)):
                choices.append(self._choice(job, place, output, completion))
        return self.head.wrap(choices, usage=usage.to_dict())

    def _best(self, output: RequestOutput) -> list[CompletionOutput]:
        if len(output.outputs) == self.n:
            return output.outputs
        return sorted(output.outputs, key=lambda c: c.cumulative_logprob or 0.0, reverse=True)[: self.n]

    def _choice(self, job: int, place: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        part = ChoicePart(self, self.tokenizer, job)
        echoed, first = part.prompt(output)
        text, rest = part.new(completion)
        both = [entry["logprobs"] for entry in (first, rest) if entry.get("logprobs") is not None]
        return {
            "index": job * self.n + place,
            **first,
            **rest,
            "text": echoed + text,
            "logprobs": lp.join(both) if both else None,
            **finish(completion, scored=self.scored),
        }


class ChoicePart:
    """Writes one choice, piece by piece."""

    def __init__(self, work: Work, tokenizer: Any, job: int) -> None:
        body, self._params, self._work = work.body, work.params, work
        self._prompt = work.prompts[job]
        self._tokenizer = tokenizer
        as_ids = bool(body.return_tokens_as_token_ids)
        self._all_tokens = as_ids or bool(body.return_token_ids)
        self._logprobs: lp.TextLogprobs | None = None
        if body.logprobs is not None:
            writer = lp.TokenWriter(tokenizer, as_ids=as_ids, skip_special=self._params.skip_special_tokens)
            self._logprobs = lp.TextLogprobs(
                tokenizer, writer, body.logprobs, self._params, self._prompt.ids, as_ids=as_ids
            )

    def prompt(self, output: RequestOutput) -> tuple[str, dict[str, Any]]:
        """Return the echoed text, and what was asked about the prompt."""
        body, found, echoed = self._work.body, dict[str, Any](), ""
        if body.echo:
            echoed, found["logprobs"] = self._echo(output)
        if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            found["prompt_logprobs"] = lp.prompt_logprobs(output.prompt_logprobs, body.prompt_logprobs)
        if body.return_token_ids:
            found["prompt_token_ids"] = self._prompt.ids
        return echoed, found

    def new(self, completion: CompletionOutput) -> tuple[str, dict[str, Any]]:
        """Return the text and what was asked about its tokens."""
        found: dict[str, Any] = {"logprobs": None}
        last = completion.finish_reason is not None
        if self._logprobs is not None:
            ids, entries = lp.visible(completion, self._params, all_tokens=self._all_tokens)
            ids, entries = ([], []) if self._work.scored else (ids, entries)
            found["logprobs"] = self._logprobs.output(ids, entries, last=last)
        if self._work.body.return_token_ids:
            found["token_ids"] = [] if self._work.scored else completion.token_ids
        return "" if self._work.scored else completion.text, found

    def _echo(self, output: RequestOutput) -> tuple[str, dict[str, Any] | None]:
        ids, text = self._prompt.ids, self._prompt.text
        if text is not None and self._logprobs is None:
            return text, None
        texts = lp.echo_texts(self._tokenizer, ids, text, skip_special=self._params.skip_special_tokens)
        echoed = "".join(texts) if text is None else text
        if self._logprobs is None:
            return echoed, None
        return echoed, self._logprobs.prompt(ids, texts, output.prompt_logprobs or [None] * len(ids))


class CompletionStream(ChoiceStream):
    """Chunks of completions: echoed prompts, texts, ends."""

    def __init__(self, generation: Generation, work: Work, path: str) -> None:
        super().__init__(generation, ChunkWriter(work.head, work.body), path, scored=work.scored)
        self._work = work
        self._parts: dict[tuple[int, int], ChoicePart] = {}

    def begin(self, job: int, output: RequestOutput) -> list[bytes]:
        """Return a chunk for each choice with what was asked about the prompt, if anything was."""
        chunks = []
        for index in range(self._work.n):
            part = self._parts[job, index] = ChoicePart(self._work, self._work.tokenizer, job)
            text, details = part.prompt(output)
            if text or details:
                chunks.append(self._chunk(job, index, text, details))
        return chunks

    def step(self, job: int, output: RequestOutput, completion: CompletionOutput) -> list[bytes]:
        """Return a chunk with new text and one with the end, as far as there is either."""
        chunks: list[bytes] = []
        text, details = self._parts[job, completion.index].new(completion)
        wanted = bool((details["logprobs"] or {}).get("tokens") or details.get("token_ids"))
        if text or wanted:
            chunks.append(self._chunk(job, completion.index, text, details))
        if completion.finish_reason is not None:
            chunks.append(self._chunk(job, completion.index, "", finish(completion, scored=self.scored)))
        return chunks

    def _chunk(self, job: int, index: int, text: str, details: dict[str, Any]) -> bytes:
        place = job * self._work.n + index
        return self.writer.chunk({"index": place, "text": text, "logprobs": None, "finish_reason": None, **details})
