"""From a conversation to the ids of a prompt, through the chat template.

Templates run in the sandbox of transformers, in a thread that is stopped after :data:`RENDER_SECONDS`. The sandbox has
no bound on memory; templates of requests are therefore refused unless ``server.trust_request_chat_template`` is set.
"""

from __future__ import annotations

import inspect
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jackfield.errors import JackfieldError, RequestError, did_you_mean
from jackfield.server.bounded import run_bounded
from jackfield.server.messages import prepare_messages
from jackfield.server.state import ServerState
from jackfield.server.text import check_text, encode
from jackfield.tokenizer import Tokenizer

RENDER_SECONDS = 5.0
"""Longest time for rendering one conversation."""
MAX_TEMPLATE = 65536
"""Characters of a template that a request brings."""

_logger = logging.getLogger("jackfield.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation and how it is to be written.

    Args:
        messages: as clients write them. tools: definitions of functions. documents: for retrieval templates.
        chat_template: of the request. variables: further ones of the template. add_generation_prompt: end with the
            head of the assistant's turn. continue_final_message: end inside the last message instead. special: add
            the tokens that begin a text, which templates usually write themselves.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    special: bool = False


async def chat_ids(state: ServerState, conversation: Conversation) -> list[int]:
    """Return the prompt of a conversation.

    Raises:
        RequestError: the template does not accept it, does not end, or does not read what the request gives it.
    """
    text = await chat_text(state, conversation)
    return await encode(state.engine, text, special=conversation.special, field="messages")


async def chat_text(state: ServerState, conversation: Conversation) -> str:
    """Return the prompt of a conversation as a text. Raises as :func:`chat_ids`."""
    tokenizer = state.engine.tokenizer
    template = _template(state, conversation)
    source = template if template is not None else own_template(tokenizer)
    _check_reads(conversation, source)
    messages = prepare_messages(conversation.messages, developer=reads(source, "developer"))
    for place, message in enumerate(messages):
        check_text(state.engine, message["content"], f"messages.{place}.content")
    extra = {"chat_template": template} if template is not None else {}
    return await _render(tokenizer, conversation, messages, {**conversation.variables, **extra})


def own_template(tokenizer: Tokenizer) -> str:
    """Return the text of the model's own templates; empty when it has none."""
    template = tokenizer.hf.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


def reads(template: str, name: str) -> bool:
    """Return whether a template mentions a name at all."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def check_template(state: ServerState) -> None:
    """Warn of a template that does not know ``add_generation_prompt``: the model may go on as the user."""
    try:
        template = state.chat_template or own_template(state.engine.tokenizer)
    except RequestError:
        return
    if template and not reads(template, "add_generation_prompt"):
        _logger.warning("the chat template does not read add_generation_prompt: the model may answer as the user")


async def _render(
    tokenizer: Tokenizer, conversation: Conversation, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> str:
    if conversation.documents is not None:
        variables["documents"] = list(conversation.documents)
    mark = f"\ue000{secrets.token_hex(8)}" if conversation.continue_final_message else ""
    messages[-1]["content"] += mark
    text = await _bounded(tokenizer, conversation, messages, variables)
    return _cut(text, mark) if mark else text


async def _bounded(
    tokenizer: Tokenizer, conversation: Conversation, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> str:
    def work() -> str:
        return tokenizer.apply_chat_template(
            messages, conversation.add_generation_prompt, conversation.tools, tokenize=False, **variables
        )

    try:
        return await run_bounded(work, RENDER_SECONDS)
    except JackfieldError:
        raise
    except TimeoutError:
        raise _refused(f"the chat template did not end within {RENDER_SECONDS:g} s on this conversation") from None
    except Exception as error:
        raise _refused(f"the chat template failed on this conversation: {type(error).__name__}: {error}") from error


def _refused(message: str) -> RequestError:
    return RequestError(message, field="messages", remedy="check the messages and the template")


def _cut(text: str, mark: str) -> str:
    """Return the text up to the mark that was put behind the last message; its own end, spaces included, stays."""
    place = text.rfind(mark)
    if place < 0:
        raise RequestError(
            "the chat template does not write the last message out, so it cannot be continued",
            field="continue_final_message",
            value=True,
            remedy="leave continue_final_message out",
        )
    return text[:place]


def _template(state: ServerState, conversation: Conversation) -> str | None:
    asked = conversation.chat_template
    if asked is None:
        return state.chat_template
    if not state.settings.trust_request_chat_template:
        raise RequestError(
            "this server does not take chat templates from requests",
            field="chat_template",
            value=asked,
            remedy="leave it out, or start the server with --trust-request-chat-template",
        )
    if len(asked) > MAX_TEMPLATE:
        raise RequestError(
            f"a chat template has at most {MAX_TEMPLATE} characters", field="chat_template", value=len(asked)
        )
    return asked


def _check_reads(conversation: Conversation, source: str) -> None:
    """Refuse what the template would silently drop."""
    if conversation.add_generation_prompt and conversation.continue_final_message:
        raise RequestError(
            "a prompt cannot both continue the last message and begin the next one",
            field="continue_final_message",
            value=True,
            remedy="set add_generation_prompt to false",
        )
    for name in ("tools", "documents"):
        if getattr(conversation, name) and source and not reads(source, name):
            raise RequestError(f"the model's chat template takes no {name}", field=name, remedy=f"leave {name} out")
    if source:
        _check_variables(conversation.variables, source)


def _check_variables(variables: Mapping[str, Any], source: str) -> None:
    taken = {*inspect.signature(Tokenizer.apply_chat_template).parameters, *_hf_parameters()}
    for name in variables:
        where = "reasoning_effort" if name == "reasoning_effort" else f"chat_template_kwargs.{name[:100]}"
        if name in taken:
            raise RequestError("this variable cannot be set here", field=where, remedy="use the request's own field")
        if not reads(source, name):
            hint = did_you_mean(name, set(re.findall(r"\b[a-z_]{3,}\b", source)))
            raise RequestError("the chat template does not read this variable", field=where, remedy=hint)


def _hf_parameters() -> set[str]:
    from transformers import PreTrainedTokenizerFast

    return {*inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters, "messages"}
