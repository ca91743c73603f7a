"""Requests and answers of OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jackfield.server.extra import ExtraFields, Refused
from jackfield.server.openai.answers import Answer
from jackfield.server.openai.values import Count, Objects, Positive, Stops, one_of

MAX_ITEMS = 10_000
"""Items of one request."""

Input = Annotated[
    str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_ITEMS)],
    one_of(f"a text or a list of 1 to {MAX_ITEMS} items"),
]

REFUSED: Refused = {
    "conversation": ("conversations are not kept; use previous_response_id", ()),
    "prompt": ("prompts of a library are not available; use instructions", ()),
    "context_management": ("contexts are not compacted", ([],)),
    "moderation": ("texts are not moderated", ()),
    "n": ("a response is one answer; send several requests", (1,)),
    "max_tokens": ("the limit is called max_output_tokens here", ()),
    "messages": ("the conversation is called input here", ()),
    "logprobs": ("include 'message.output_text.logprobs' instead", (False,)),
    "response_format": ("the format is called text.format here", ()),
    "structured_outputs": ("structured output is not available yet", ()),
}
"""Fields that this server does not honour."""


class ResponsesRequest(ExtraFields):
    """A request for a response."""

    model: str | None = None
    """Name of the model; the server's own when not given."""
    input: Input
    """A text, or items: messages, calls of functions and their results."""
    instructions: str | None = None
    """What stands before the conversation; not carried over to later responses."""
    previous_response_id: str | None = None
    """Go on from this response, which must be in the store."""
    store: bool | None = None
    """Keep the response, so that it can be asked for by its id; on by default."""
    background: bool | None = None
    """Answer at once, and go on when the client leaves."""
    stream: bool | None = None
    """Send the answer in pieces, as server-sent events."""
    stream_options: dict[str, Any] | None = None
    """For streams only. Events are not obfuscated."""
    max_output_tokens: Positive | None = None
    """Most tokens of the answer."""
    temperature: float | None = None
    top_p: float | None = None
    stop: Stops = None
    """Texts that end the answer; not a field of OpenAI's."""
    top_logprobs: Count | None = None
    """Send this many of the most likely tokens at each place too; needs `include`."""
    include: list[str] | None = None
    """`message.output_text.logprobs` sends the log probability of each token."""
    truncation: Literal["auto", "disabled"] | None = None
    """`auto` drops the oldest messages when the conversation does not fit into the context."""
    text: dict[str, Any] | None = None
    """`{"format": {"type": "text"}}`."""
    reasoning: dict[str, Any] | None = None
    """`effort`: for chat templates that read `reasoning_effort`."""
    tools: Objects = None
    """Functions that the model may call, for the chat template."""
    tool_choice: str | dict[str, Any] | None = None
    """`auto`, or `none`: then the model does not hear of the tools."""
    parallel_tool_calls: bool | None = None
    """No effect: answers are text, and hold no parsed calls."""
    max_tool_calls: int | None = None
    """No effect: no tools are run here."""
    metadata: dict[str, str] | None = None
    """Given back with the response."""
    service_tier: Literal["auto", "default"] | None = None
    """There is one tier."""
    prompt_cache_key: str | None = None
    """No effect: all prefixes are cached."""
    safety_identifier: str | None = None
    """No effect on the answer."""
    user: str | None = None
    """No effect on the answer."""


class ResponseAnswer(BaseModel):
    """A response, as documents describe it; settings of the request are given back in it too."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    """One message of the assistant, once there is one."""
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None


class Deleted(Answer):
    """A response that is no longer kept."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(Answer):
    """The input of a response."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
