"""``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from jackfield.engine.outputs import CompletionOutput, RequestOutput
from jackfield.errors import RequestError
from jackfield.protocol import SamplingParams
from jackfield.server import sse
from jackfield.server.chat import Conversation, chat_ids
from jackfield.server.generation import Generation, Job, Usage, begin, collect
from jackfield.server.openai import logprobs as lp
from jackfield.server.openai import params as build
from jackfield.server.openai.answers import ERRORS, ChatCompletion
from jackfield.server.openai.common import ChoiceStream, ChunkWriter, Head, finish, json_response, make_id
from jackfield.server.openai.types import ChatCompletionRequest
from jackfield.server.openai.unknown import ignored_header, refuse_unserved
from jackfield.server.state import ServerState, state_of
from jackfield.server.text import check_room, truncate

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=ERRORS)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    state = state_of(request)
    _check(state, body)
    chat = Chat(state, body, await _job(state, body))
    if not body.stream:
        [output] = await collect(state.engine, [chat.job], request)
        return json_response(chat.answer(output), ignored_header(body))
    generation = await begin(state.engine, [chat.job], request)
    stream = ChatStream(generation, chat, request.url.path)
    return sse.EventStream(stream.events(), ignored_header(body), generation.close)


def _check(state: ServerState, body: ChatCompletionRequest) -> None:
    build.check_common(state, body)
    refuse_unserved(body)
    _check_tools(body)
    _check_format(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs", field="top_logprobs", remedy="set logprobs to true")
    build.check_logprobs(state, "top_logprobs", body.top_logprobs)
    if None not in (both := (body.max_tokens, body.max_completion_tokens)) and len(set(both)) > 1:
        raise RequestError(
            "max_tokens and max_completion_tokens are two names of one limit, and differ",
            field="max_tokens",
            value=body.max_tokens,
            remedy="give max_completion_tokens only",
        )


def _check_tools(body: ChatCompletionRequest) -> None:
    for place, tool in enumerate(body.tools or ()):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            remedy = "send {'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
            raise RequestError("a tool is a function with a name", field=f"tools.{place}", remedy=remedy)
    if body.tool_choice not in (None, "none", "auto"):
        raise RequestError(
            "calls of tools cannot be forced yet: answers are text, and no parser reads calls out of them",
            field="tool_choice",
            value=body.tool_choice,
            remedy="use 'auto' or 'none'",
        )


def _check_format(body: ChatCompletionRequest) -> None:
    kind = "text" if body.response_format is None else body.response_format.get("type")
    if kind in ("json_object", "json_schema", "structural_tag"):
        raise RequestError("structured output is not available yet", field="response_format", value=kind)
    if kind != "text":
        raise RequestError("the type of response_format is 'text'", field="response_format.type", value=kind)


async def _job(state: ServerState, body: ChatCompletionRequest) -> Job:
    max_tokens = _max_tokens(body)
    ids = await chat_ids(state, _conversation(body))
    ids = truncate(state.engine, ids, body.truncate_prompt_tokens, max_tokens)
    check_room(state.engine, len(ids), max_tokens, field="messages", limit_field=_limit_name(body))
    return Job(
        request_id=make_id("chatcmpl", body),
        prompt_ids=ids,
        params=_params(state, body, max_tokens),
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
    )


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _limit_name(body: ChatCompletionRequest) -> str:
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def _params(state: ServerState, body: ChatCompletionRequest, max_tokens: int | None) -> SamplingParams:
    scored = body.prompt_logprobs
    if body.echo and body.logprobs:
        scored = max(body.top_logprobs or 0, scored or 0)
    build.check_scored(body, max_tokens, scored=scored is not None or bool(body.echo), field=_limit_name(body))
    return build.sampling_params(
        state.engine,
        body,
        max_tokens=build.default_max_tokens(state.engine, None) if max_tokens is None else max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=scored,
    )


def _conversation(body: ChatCompletionRequest) -> Conversation:
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    continued = bool(body.continue_final_message)
    return Conversation(
        messages=body.messages,
        tools=body.tools,
        documents=body.documents,
        chat_template=body.chat_template,
        variables=variables,
        add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continued,
        special=bool(body.add_special_tokens),
    )


class Chat:
    """One chat completion under way: what its request wants in the answer."""

    def __init__(self, state: ServerState, body: ChatCompletionRequest, job: Job) -> None:
        self.job, self.body = job, body
        self.scored = _max_tokens(body) == 0
        self.writer = lp.TokenWriter(
            state.engine.tokenizer,
            as_ids=bool(body.return_tokens_as_token_ids),
            skip_special=job.params.skip_special_tokens,
        )
        self._model = state.check_model(body.model)
        self._fingerprint = state.fingerprint

    def head(self, kind: str) -> Head:
        """Return the head of objects of a kind."""
        return Head(id=self.job.request_id, object=kind, model=self._model, fingerprint=self._fingerprint)

    @property
    def echoed(self) -> str:
        """The text that comes before the answer: the last message, when the answer is of the same turn."""
        last = self.body.messages[-1]
        conversation = _conversation(self.body)
        same = not conversation.add_generation_prompt or last.get("role") == "assistant"
        content = last.get("content")
        return content if self.body.echo and same and isinstance(content, str) else ""

    def answer(self, output: RequestOutput) -> dict[str, Any]:
        """Return the whole answer."""
        usage = Usage(len(output.prompt_token_ids), 0, output.num_cached_tokens)
        if not self.scored:
            usage.completion = sum(len(completion.token_ids) for completion in output.outputs)
        choices = [self._choice(completion) for completion in output.outputs]
        return self.head("chat.completion").wrap(choices, usage=usage.to_dict(), **self.about_prompt(output))

    def about_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """Return what was asked about the prompt."""
        found: dict[str, Any] = {}
        count = self.job.params.prompt_logprobs
        if count is not None and output.prompt_logprobs is not None:
            found["prompt_logprobs"] = lp.prompt_logprobs(output.prompt_logprobs, count)
        if self.body.return_token_ids:
            found["prompt_token_ids"] = output.prompt_token_ids
        return found

    def details(self, completion: CompletionOutput) -> dict[str, Any]:
        """Return log probabilities and token ids of the tokens in ``completion``, as far as they were asked for."""
        found: dict[str, Any] = {"logprobs": None}
        if self.body.logprobs:
            everything = bool(self.body.return_token_ids or self.body.return_tokens_as_token_ids)
            ids, entries = lp.visible(completion, self.job.params, all_tokens=everything)
            ids, entries = ([], []) if self.scored else (ids, entries)
            found["logprobs"] = lp.chat_logprobs(self.writer, ids, entries, self.body.top_logprobs or 0)
        if self.body.return_token_ids:
            found["token_ids"] = [] if self.scored else completion.token_ids
        return found

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        text = self.echoed + ("" if self.scored else completion.text)
        return {
            "index": completion.index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            **self.details(completion),
            **finish(completion, scored=self.scored),
        }


class ChatStream(ChoiceStream):
    """Chunks of a chat completion: roles, texts, ends."""

    def __init__(self, generation: Generation, chat: Chat, path: str) -> None:
        writer = ChunkWriter(chat.head("chat.completion.chunk"), chat.body)
        super().__init__(generation, writer, path, scored=chat.scored)
        self._chat = chat

    def begin(self, job: int, output: RequestOutput) -> list[bytes]:
        """Return a chunk with the role for each choice, and one with the echoed message."""
        about = self._chat.about_prompt(output)
        chunks = []
        for index in range(self._chat.job.params.n):
            chunks.append(self._chunk(index, {"role": "assistant", "content": ""}, **(about if index == 0 else {})))
            if self._chat.echoed:
                chunks.append(self._chunk(index, {"content": self._chat.echoed}))
        return chunks

    def step(self, job: int, output: RequestOutput, completion: CompletionOutput) -> list[bytes]:
        """Return a chunk with new text and one with the end, as far as there is either."""
        chunks: list[bytes] = []
        details = self._chat.details(completion)
        wanted = bool((details["logprobs"] or {}).get("content") or details.get("token_ids"))
        if not self.scored and (completion.text or wanted):
            chunks.append(self._chunk(completion.index, {"content": completion.text}, details))
        if completion.finish_reason is not None:
            chunks.append(self._chunk(completion.index, {}, finish(completion, scored=self.scored)))
        return chunks

    def _chunk(self, index: int, delta: dict[str, Any], details: dict[str, Any] | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **(details or {})}
        return self.writer.chunk(choice, **more)
