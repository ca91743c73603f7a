"""A conversation with a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from jackfield.client.connection import Connection


async def stream_answer(
    connection: Connection,
    model: str,
    messages: Sequence[Mapping[str, str]],
    fields: Mapping[str, Any],
    show: Callable[[str], object],
) -> tuple[str, int]:
    """Return the answer to a conversation and its tokens as the server counts them (0 when it does not say).

    Args:
        fields: further fields of the request. show: called with each piece of text as it comes.

    Raises:
        UnreachableError, AnswerError, BrokenAnswerError: as :meth:`Connection.stream`.
    """
    options = {"stream": True, "stream_options": {"include_usage": True}}
    pieces, tokens = [], 0
    body = {"model": model, "messages": list(messages), **options, **fields}
    async with aclosing(connection.stream("/v1/chat/completions", body)) as events:
        async for event in events:
            tokens = event.usage.completion_tokens if event.usage is not None else tokens
            for text in (choice.new_text() for choice in event.choices):
                if text:
                    pieces.append(text)
                    show(text)
    return "".join(pieces), tokens
