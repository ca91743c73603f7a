"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from jackfield.server import sse
from jackfield.server.anthropic.answers import PATH, MessageWriter, new_id
from jackfield.server.anthropic.prompt import prompt_ids
from jackfield.server.anthropic.types import ERRORS, REFUSED, CountRequest, Message, MessagesRequest, TokenCount
from jackfield.server.extra import refuse, sampling_fields
from jackfield.server.generation import Job, begin, collect
from jackfield.server.openai import params as build
from jackfield.server.openai.common import json_response
from jackfield.server.openai.unknown import ignored_header
from jackfield.server.state import ServerState, state_of
from jackfield.server.text import check_room

router = APIRouter(tags=["Anthropic"])


@router.post(PATH, response_model=Message, responses=ERRORS)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    state = state_of(request)
    model = state.check_model(body.model)
    refuse(body, REFUSED)
    job = await _job(state, body)
    writer = MessageWriter(job.request_id, model, body.max_tokens, body.stop_sequences or [])
    if not body.stream:
        [output] = await collect(state.engine, [job], request)
        return json_response(writer.answer(output), ignored_header(body))
    generation = await begin(state.engine, [job], request)
    return sse.EventStream(writer.events(generation), ignored_header(body), generation.close)


@router.post(f"{PATH}/count_tokens", response_model=TokenCount, responses=ERRORS)
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """Count the tokens of a prompt."""
    state = state_of(request)
    state.check_model(body.model)
    refuse(body, REFUSED)
    ids = await prompt_ids(state, body)
    return json_response({"input_tokens": len(ids)}, ignored_header(body))


async def _job(state: ServerState, body: MessagesRequest) -> Job:
    fields = sampling_fields(
        body,
        model=body.model,
        stream=body.stream,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
    )
    build.check_common(state, fields)
    params = build.sampling_params(state.engine, fields, max_tokens=body.max_tokens)
    ids = await prompt_ids(state, body)
    # More than what is left of the context is no error in this API: the answer says when it was the context that ended.
    check_room(state.engine, len(ids), None, field="messages", limit_field="max_tokens")
    return Job(
        request_id=new_id(),
        prompt_ids=ids,
        params=params,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
    )
