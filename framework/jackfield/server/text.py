"""From text to token ids without blocking the event loop."""

from __future__ import annotations

import asyncio

from jackfield.errors import RequestError
from jackfield.server.engine_view import Engine
from jackfield.tokenizer import Tokenizer

_SHORT = 4096
"""Characters that are tokenized at once; longer texts go to a thread."""
_LONGEST_TOKEN = 512
"""Characters of the longest token that is thought of. A text longer than the context times this cannot fit."""


async def encode(engine: Engine, text: str, *, special: bool, field: str) -> list[int]:
    """Return the ids of ``text``.

    Args:
        special: add the tokens that begin (and end) a text. field: of the request, for errors.

    Raises:
        RequestError: the text cannot fit into the context, or is no Unicode text.
    """
    check_text(engine, text, field)
    if len(text) <= _SHORT:
        return engine.tokenizer.encode(text, add_special_tokens=special)
    return await asyncio.to_thread(_encode, engine.tokenizer, text, special)


def check_text(engine: Engine, text: str, field: str) -> None:
    """Refuse what need not be tokenized to know that it will not do.

    Raises:
        RequestError: as :func:`encode`.
    """
    limit = engine.max_model_len
    if len(text) > _LONGEST_TOKEN * limit:
        raise RequestError(
            f"the prompt has {len(text)} characters, but the context holds {limit} tokens",
            field=field,
            value=len(text),
            remedy="shorten the prompt",
        )
    if not _is_unicode(text):
        raise RequestError(
            "the text has half of a surrogate pair, which is no character",
            field=field,
            value=text[:100],
            remedy="send valid Unicode",
        )


def check_room(engine: Engine, length: int, max_tokens: int | None, *, field: str, limit_field: str) -> None:
    """Refuse a prompt that leaves too little of the context.

    Args:
        length: of the prompt, in tokens. max_tokens: asked for, or None for what is left. field, limit_field: names
            of both in the request.

    Raises:
        RequestError: the prompt alone is too long, or both together are.
    """
    limit = engine.max_model_len
    if length >= limit:
        raise RequestError(
            f"the prompt has {length} tokens, but the context holds {limit} with at least one of output",
            field=field,
            value=length,
            remedy=f"shorten the prompt to {limit - 1} tokens or less",
        )
    if max_tokens is not None and length + max_tokens > limit:
        raise RequestError(
            f"the prompt has {length} tokens and {limit_field} is {max_tokens}, together {length + max_tokens}, "
            f"but the context holds {limit}",
            field=limit_field,
            value=max_tokens,
            remedy=f"ask for at most {limit - length} tokens, or shorten the prompt",
        )


def truncate(engine: Engine, ids: list[int], keep: int | None, max_tokens: int | None) -> list[int]:
    """Return the last ``keep`` ids; -1 keeps as many as leave room for ``max_tokens``."""
    if keep is None:
        return ids
    if keep == -1:
        keep = max(1, engine.max_model_len - max(max_tokens or 1, 1))
    return ids[-keep:]


def _encode(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=special)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
