"""From a request to the prompt of a response."""

from __future__ import annotations

from typing import Any

from jackfield.errors import RequestError
from jackfield.server.chat import Conversation, chat_ids
from jackfield.server.extra import fields_renamed, template_of
from jackfield.server.responses.checks import template_tools, template_variables
from jackfield.server.responses.items import Item, messages_of
from jackfield.server.responses.types import ResponsesRequest
from jackfield.server.state import ServerState
from jackfield.server.text import check_room

Messages = list[dict[str, Any]]


async def prompt_ids(state: ServerState, body: ResponsesRequest, context: list[Item]) -> list[int]:
    """Return the prompt of a response, shortened where the request asks for that.

    Args:
        context: all items of the conversation.

    Raises:
        RequestError: the template does not take it, or it does not fit into the context.
    """
    template = template_of(state)
    messages = messages_of(context, template)
    fixed: Messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    tools, variables = template_tools(body), template_variables(body, template)

    async def ids_from(first: int) -> list[int]:
        """Return the prompt without the messages before ``first``, but with all of the system."""
        kept = [m for place, m in enumerate(messages) if place >= first or m["role"] in ("system", "developer")]
        conversation = Conversation(messages=[*fixed, *kept], tools=tools, variables=variables)
        with fields_renamed(messages="input", reasoning_effort="reasoning.effort"):
            ids = await chat_ids(state, conversation)
        check_room(state.engine, len(ids), body.max_output_tokens, field="input", limit_field="max_output_tokens")
        return ids

    if body.truncation != "auto":
        return await ids_from(0)
    return await _longest(ids_from, _beginnings(messages))


def _beginnings(messages: Messages) -> list[int]:
    """Return where a shortened conversation may begin: with a message of the user."""
    return sorted({0, *(place for place, message in enumerate(messages) if message["role"] == "user")})


async def _longest(ids_from: Any, beginnings: list[int]) -> list[int]:
    """Return the longest prompt that fits: what is shorter than one that fits, fits too."""
    try:
        whole: list[int] = await ids_from(beginnings[0])
        return whole
    except RequestError:
        if len(beginnings) == 1:
            raise
    best: list[int] = await ids_from(beginnings[-1])
    low, high = 1, len(beginnings) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            best, high = await ids_from(beginnings[middle]), middle
        except RequestError:
            low = middle + 1
    return best
