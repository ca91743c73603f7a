"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from jackfield.errors import RequestError
from jackfield.server.chat import Conversation, chat_ids
from jackfield.server.openai.answers import ErrorAnswer, Text, Tokens
from jackfield.server.openai.types import DetokenizeRequest, TokenizeRequest
from jackfield.server.state import ServerState, state_of
from jackfield.server.text import encode

router = APIRouter(tags=["Tokens"])
_ERRORS: dict[int | str, dict[str, Any]] = {400: {"model": ErrorAnswer}, 404: {"model": ErrorAnswer}}


@router.post("/tokenize", response_model_exclude_none=True, responses=_ERRORS)
async def tokenize(body: TokenizeRequest, request: Request) -> Tokens:
    """Return the ids of a text or of a conversation."""
    state = state_of(request)
    state.check_model(body.model)
    ids = await _ids(state, body)
    names = state.engine.tokenizer.hf.convert_ids_to_tokens(ids) if body.return_token_strs else None
    return Tokens(count=len(ids), max_model_len=state.engine.max_model_len, tokens=ids, token_strs=names)


@router.post("/detokenize", responses=_ERRORS)
async def detokenize(body: DetokenizeRequest, request: Request) -> Text:
    """Return the text of ids."""
    state = state_of(request)
    state.check_model(body.model)
    limit = state.engine.vocab_size
    outside = [token for token in body.tokens if not 0 <= token < limit]
    if outside:
        raise RequestError(
            f"tokens has ids outside the vocabulary: {outside[:8]}",
            field="tokens",
            value=outside[:8],
            remedy=f"use ids from 0 to {limit - 1}",
        )
    text = await asyncio.to_thread(state.engine.tokenizer.decode, body.tokens, body.skip_special_tokens)
    return Text(prompt=text)


async def _ids(state: ServerState, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either a prompt or messages", field="prompt", remedy="give one of them")
    if body.prompt is not None:
        _refuse_chat_fields(body)
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return await encode(state.engine, body.prompt, special=special, field="prompt")
    continued = bool(body.continue_final_message)
    conversation = Conversation(
        messages=body.messages or (),
        tools=body.tools,
        documents=body.documents,
        chat_template=body.chat_template,
        variables=body.chat_template_kwargs or {},
        add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continued,
        special=bool(body.add_special_tokens),
    )
    return await chat_ids(state, conversation)


def _refuse_chat_fields(body: TokenizeRequest) -> None:
    names = ("tools", "documents", "chat_template", "chat_template_kwargs", "add_generation_prompt")
    for name in (*names, "continue_final_message"):
        if getattr(body, name) is not None:
            raise RequestError(
                f"{name} is for conversations, and a prompt was given", field=name, remedy="send messages"
            )
