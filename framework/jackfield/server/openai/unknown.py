"""Fields of a request that do nothing here: refused when that would change the answer, and else ignored and named."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from jackfield.errors import RequestError
from jackfield.server.openai.types import RequestModel

IGNORED_HEADER = "x-jackfield-ignored"
"""Header of an answer that lists the ignored fields of its request."""
_MOST_NAMES = 20
_GRAMMAR = "structured output is not available yet"
_BEAMS = "beam search is not served over HTTP"
REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "structured_outputs": (_GRAMMAR, ()),
    "guided_json": (_GRAMMAR, ()),
    "guided_regex": (_GRAMMAR, ()),
    "guided_choice": (_GRAMMAR, ()),
    "guided_grammar": (_GRAMMAR, ()),
    "guided_decoding_backend": (_GRAMMAR, ()),
    "grammar": (_GRAMMAR, ("",)),
    "json_schema": (_GRAMMAR, ()),
    "use_beam_search": (_BEAMS, (False,)),
    "length_penalty": (_BEAMS, (1, 1.0)),
    "functions": ("functions are an older form of tools, which is not served", ([],)),
    "function_call": ("function_call is an older form of tool_choice, which is not served", ("none",)),
    "modalities": ("the model writes text only", (["text"],)),
    "audio": ("the model writes text only", ()),
    "prediction": ("predicted outputs are not available", ()),
    "web_search_options": ("the server cannot search the web", ()),
    "verbosity": ("verbosity is not available", ("medium",)),
    "logprob_token_ids": ("log probabilities of chosen token ids are not available", ()),
    "thinking_token_budget": ("a budget for thinking is not available", ()),
    "prompt_embeds": ("prompts made of embeddings are not available", ()),
    "truncation_side": ("prompts are truncated on the left", ("left",)),
    "kv_transfer_params": ("the cache cannot be transferred", ()),
    "lora_request": ("adapters are not available", ()),
}
"""Fields that clients of such servers know and that would change the answer: why they are refused, and the values that
ask for nothing.
"""

_logger = logging.getLogger("jackfield.server")


def refuse_unserved(request: RequestModel) -> None:
    """Refuse fields of :data:`REFUSED`.

    Raises:
        RequestError: lists all of them.
    """
    found = {name: REFUSED[name][0] for name, value in _extra(request) if name in REFUSED and _asks(name, value)}
    if found:
        text = "; ".join(f"{name}: {why}" for name, why in found.items())
        raise RequestError(text, field=next(iter(found)), remedy="leave it out")


def ignored_header(request: RequestModel) -> dict[str, str]:
    """Return the header that names the fields which nothing reads, or no header."""
    names = [name for name, _ in _extra(request) if name not in REFUSED]
    options = getattr(request, "stream_options", None)
    if options is not None:
        names += [f"stream_options.{name}" for name, _ in _extra(options)]
    if not names:
        return {}
    _logger.debug("%d fields of a request are ignored: %s", len(names), names[:_MOST_NAMES])
    shown = [quote(name[:64], safe="._-", errors="replace") for name in names[:_MOST_NAMES]]
    return {IGNORED_HEADER: ", ".join([*shown, *(["..."] if len(names) > _MOST_NAMES else [])])}


def _extra(request: RequestModel) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in (request.model_extra or {}).items() if value is not None]


def _asks(name: str, value: Any) -> bool:
    return not any(value == neutral and type(value) is type(neutral) for neutral in REFUSED[name][1])
