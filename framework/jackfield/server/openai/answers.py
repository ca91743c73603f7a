"""Answers of OpenAI's API as documents describe them. The server writes them by hand, which is faster; tests hold what
it writes against these models.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Base of answers."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class ErrorDetail(Answer):
    """What is wrong."""

    message: str
    """For people."""
    type: str
    param: str | None
    """The request's field at fault, as a dotted path."""
    code: str | None


class ErrorAnswer(Answer):
    """An error."""

    error: ErrorDetail


class PromptTokensDetails(Answer):
    """Where the prompt's tokens came from."""

    cached_tokens: int
    """Found in the prefix cache."""


class UsageAnswer(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(Answer):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int] | None
    """What the token adds to the bytes of the text; null for tokens that are no part of it."""


class ChosenTokenLogprob(TokenLogprob):
    """A token of the answer."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """Log probabilities of an answer."""

    content: list[ChosenTokenLogprob]
    refusal: None = None


class AssistantMessage(Answer):
    """The answer to a conversation."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: int | str | None
    """The stop text or stop id that ended it, or `repetition`; null for the model's own end."""
    token_ids: list[int] | None = None


class PromptLogprob(Answer):
    """A likely token in the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class ChatCompletion(Answer):
    """Answers to a conversation. Streams hold the same in pieces, as `chat.completion.chunk`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(Answer):
    """Log probabilities of a text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(Answer):
    """Continuations of texts. Streams hold the same in pieces."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageAnswer


class ModelCard(Answer):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jackfield"
    root: str
    """Where the model comes from."""
    max_model_len: int
    """Longest sequence, prompt and output together, in tokens."""


class ModelList(Answer):
    """All names under which a model is served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(Answer):
    """Ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(Answer):
    """The text of ids."""

    prompt: str


class Status(Answer):
    """Whether requests are taken."""

    status: Literal["ok", "draining", "dead"]


class Version(Answer):
    """The version of the server."""

    version: str


class Load(Answer):
    """Requests now."""

    server_load: int
    """Running and waiting together."""
    running: int
    waiting: int


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "The request is wrong."},
    404: {"model": ErrorAnswer, "description": "The model is not served here."},
    503: {"model": ErrorAnswer, "description": "The server is full, is about to stop, or its engine died."},
}
"""Errors of routes that ask the model, for the documents."""
