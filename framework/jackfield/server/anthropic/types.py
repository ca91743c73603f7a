"""Requests and answers of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jackfield.server.extra import ExtraFields, Refused
from jackfield.server.openai.answers import Answer
from jackfield.server.openai.types import RequestModel
from jackfield.server.openai.values import Objects, Positive, one_of

MAX_MESSAGES = 10_000
"""Messages of one conversation."""
MAX_STOPS = 1024
"""Stop sequences of one request."""

System = Annotated[str | list[dict[str, Any]] | None, one_of("a text or a list of text blocks")]
Stops = Annotated[
    Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)] | None,
    one_of(f"a list of at most {MAX_STOPS} texts, none of them empty"),
]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]

_STRUCTURED = "structured output is not available yet"
_CODE = "code cannot be run here"
REFUSED: Refused = {
    "container": (_CODE, ()),
    "mcp_servers": ("tools are not run here", ([],)),
    "context_management": ("conversations are not edited here", ({}, {"edits": []})),
    "output_format": (_STRUCTURED, ({"type": "text"},)),
    "diagnostics": ("diagnostics of caches are not available", ()),
    "inference_geo": ("there is one place where requests run", ()),
    "speed": ("there is one speed", ("standard",)),
}
"""Fields of the API that this server does not honour."""


class Conversed(RequestModel):
    """What a conversation is made of."""

    model: str | None = None
    """Name of the model; the server's own when not given."""
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The conversation. A last message of the assistant is continued."""
    system: System = None
    """What stands before the conversation."""
    tools: Objects = None
    """Functions that the model may call, for the chat template."""
    tool_choice: dict[str, Any] | None = None
    """`auto`, or `none`: then the model does not hear of the tools."""
    thinking: dict[str, Any] | None = None
    """For chat templates that read `enable_thinking` or `thinking`."""
    output_config: dict[str, Any] | None = None
    """`effort`: for chat templates that read `reasoning_effort`."""
    cache_control: dict[str, Any] | None = None
    """No effect: all prefixes are cached."""


class CountRequest(Conversed):
    """A request for the length of a prompt."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""


class MessagesRequest(Conversed, ExtraFields):
    """A request for the next message of a conversation."""

    max_tokens: Positive
    """Most tokens of the answer."""
    stream: bool | None = None
    """Send the answer in pieces, as server-sent events."""
    stop_sequences: Stops = None
    """Texts that end the answer."""
    temperature: Share | None = None
    top_p: Share | None = None
    metadata: dict[str, Any] | None = None
    """No effect on the answer."""
    service_tier: Literal["auto", "standard_only"] | None = None
    """There is one tier."""


class TextBlock(Answer):
    """A text."""

    type: Literal["text"]
    text: str


class MessageUsage(Answer):
    """Tokens of a request. The prompt is the sum of the three kinds of input tokens."""

    input_tokens: int
    """Those that were not found in the prefix cache."""
    cache_read_input_tokens: int
    """Those that were."""
    cache_creation_input_tokens: int
    """Always 0: all prefixes are cached."""
    output_tokens: int


class Message(Answer):
    """The answer to a conversation. Streams hold the same in pieces."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded"]
    stop_sequence: str | None
    """The stop sequence that ended the answer."""
    usage: MessageUsage


class TokenCount(Answer):
    """The length of a prompt."""

    input_tokens: int


class ErrorKind(Answer):
    """What is wrong."""

    type: str
    message: str
    """For people; begins with the field at fault."""


class MessageError(Answer):
    """An error."""

    type: Literal["error"]
    error: ErrorKind
    request_id: str | None = None


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": MessageError, "description": "The request is wrong."},
    404: {"model": MessageError, "description": "The model is not served here."},
    503: {"model": MessageError, "description": "The server is about to stop, or its engine died."},
    529: {"model": MessageError, "description": "The server is full."},
}
"""Errors of these routes, for the documents."""
