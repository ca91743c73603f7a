"""Events of streamed answers, as far as clients here look at them."""

from __future__ import annotations

from typing import Any

import msgspec

from jackfield.client.errors import AnswerError, BrokenAnswerError, error_text

DONE = "[DONE]"


class Usage(msgspec.Struct):
    """Tokens of a request, counted by the server."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Delta(msgspec.Struct):
    """New text of a chat answer. Thoughts and tool calls count as output too."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class Choice(msgspec.Struct):
    """What is new in one choice: ``text`` in completions, ``delta`` in chats."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    def new_text(self) -> str:
        """Return the new text of the answer."""
        return (self.delta.content if self.delta is not None else self.text) or ""

    def has_output(self) -> bool:
        """Return whether there is new output of any kind."""
        if self.delta is None:
            return bool(self.text)
        delta = self.delta
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class Event(msgspec.Struct):
    """One event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Event)


def decode(data: str | bytes) -> Event:
    """Return the event in the data of a server-sent event.

    Raises:
        BrokenAnswerError: it is no event of OpenAI's API. AnswerError: the server reports an error.
    """
    try:
        event = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise BrokenAnswerError(f"the stream holds something that is no event: {error}") from error
    if event.error is not None:
        raise AnswerError(error_text(event.error), 200)
    return event
