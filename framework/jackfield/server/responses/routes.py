"""``/v1/responses`` and what lies below it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.exceptions import HTTPException

from jackfield.errors import RequestError
from jackfield.protocol import SamplingParams
from jackfield.server import sse
from jackfield.server.errors import NotKeptError
from jackfield.server.extra import sampling_fields
from jackfield.server.generation import Generation, Job, begin, collect
from jackfield.server.openai import params as build
from jackfield.server.openai.answers import ERRORS
from jackfield.server.openai.common import json_response
from jackfield.server.openai.unknown import ignored_header
from jackfield.server.responses.answer import Answer
from jackfield.server.responses.checks import check, wants_logprobs
from jackfield.server.responses.items import Item, input_items
from jackfield.server.responses.prompt import prompt_ids
from jackfield.server.responses.record import Record
from jackfield.server.responses.store import ResponseStore, store_of
from jackfield.server.responses.types import Deleted, ItemList, ResponseAnswer, ResponsesRequest
from jackfield.server.state import ServerState, state_of

REFUSAL_SECONDS = 0.02
"""How long a response in the background is watched for being refused by the engine, before it is called queued."""

router = APIRouter(prefix="/v1/responses", tags=["Responses"])


@dataclass(frozen=True, slots=True)
class Work:
    """A response that can begin.

    Args:
        record: what will hold it. job: for the engine. stored: whether the record is kept.
    """

    record: Record
    job: Job
    stored: bool


@router.post("", response_model=ResponseAnswer, responses=ERRORS)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Make a response."""
    state, store = state_of(request), store_of(request)
    work = await _work(state, store, body)
    headers = ignored_header(body)
    if body.background:
        store.check_room()
        generation = await _begin_apart(state, work.job)
    elif body.stream:
        generation = await begin(state.engine, [work.job], request)
    else:
        [output] = await collect(state.engine, [work.job], request)
        work.record.complete(output)
        _keep(store, work)
        return json_response(work.record.answer.response(), headers)
    work.record.start(generation)
    _keep(store, work)
    if not body.stream:
        return json_response(work.record.answer.response(), headers)
    return _stream(work.record, -1, headers, ends=not body.background)


@router.get("/{response_id}", response_model=ResponseAnswer, responses=ERRORS)
async def get_response(
    response_id: str, request: Request, stream: bool = False, starting_after: Annotated[int | None, Query(ge=0)] = None
) -> Response:
    """Show a response; with `stream` its events, from the one behind `starting_after` on."""
    record = store_of(request).get(response_id)
    if not stream:
        if starting_after is not None:
            raise RequestError("starting_after needs a stream", field="starting_after", remedy="set stream to true")
        return json_response(record.answer.response(), {})
    if not record.streamed:
        raise RequestError(
            "this response was made as a whole and has no events",
            field="stream",
            value=True,
            remedy="ask for it without a stream, or make it with stream or background",
        )
    return _stream(record, -1 if starting_after is None else starting_after, {}, ends=False)


@router.post("/{response_id}/cancel", response_model=ResponseAnswer, responses=ERRORS)
async def cancel_response(response_id: str, request: Request) -> Response:
    """End a response in the background; one that is over stays as it is."""
    record = store_of(request).get(response_id)
    if not record.background:
        raise RequestError(
            "only responses in the background can be cancelled",
            field="response_id",
            value=response_id,
            remedy="close the connection of a stream instead",
        )
    await record.cancel()
    return json_response(record.answer.response(), {})


@router.delete("/{response_id}", responses=ERRORS)
async def delete_response(response_id: str, request: Request) -> Deleted:
    """Let go of a response, and end it where it still runs."""
    store = store_of(request)
    record = store.get(response_id)
    store.remove(record)
    if record.background:
        await record.cancel()
    return Deleted(id=response_id)


@router.get("/{response_id}/input_items", responses=ERRORS)
async def list_input_items(
    response_id: str,
    request: Request,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> ItemList:
    """List the input of a response, without what came before it in the conversation."""
    items = store_of(request).get(response_id).items
    items = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise RequestError("the response has no such item", field="after", value=after, remedy="name one of its items")
    begin_at = 0 if after is None else ids.index(after) + 1
    page = items[begin_at : begin_at + limit]
    ends: list[str | None] = [page[0]["id"], page[-1]["id"]] if page else [None, None]
    more = begin_at + limit < len(items)
    return ItemList(data=page, first_id=ends[0], last_id=ends[1], has_more=more)


async def _work(state: ServerState, store: ResponseStore, body: ResponsesRequest) -> Work:
    check(state, body)
    stored = _is_stored(store, body)
    items = input_items(body.input)
    context = [*_context(store, body.previous_response_id), *items]
    params = _params(state, body)
    ids = await prompt_ids(state, body, context)
    answer = Answer(state, body, params, stored=stored)
    job = Job(
        request_id=answer.id,
        prompt_ids=ids,
        params=params,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
    )
    return Work(Record(answer, items, context, background=bool(body.background)), job, stored)


def _is_stored(store: ResponseStore, body: ResponsesRequest) -> bool:
    """Return whether a response will be kept: where there is no store, only those that do not ask are not."""
    for name in ("background", "store"):
        if getattr(body, name):
            store.check(name, True)
    return not store.absent and body.store is not False


def _context(store: ResponseStore, response_id: str | None) -> list[Item]:
    if response_id is None:
        return []
    try:
        record = store.get(response_id)
    except HTTPException as error:
        raise NotKeptError(error.detail, "previous_response_id") from None
    if record.answer.status not in ("completed", "incomplete", "cancelled"):
        raise RequestError(
            f"the response has the status '{record.answer.status}' and cannot be continued",
            field="previous_response_id",
            value=response_id,
            remedy="wait for its end, or continue another one",
        )
    return record.context


def _params(state: ServerState, body: ResponsesRequest) -> SamplingParams:
    fields = sampling_fields(
        body,
        model=body.model,
        stream=body.stream or body.background,
        temperature=body.temperature,
        top_p=body.top_p,
        stop=body.stop,
    )
    build.check_common(state, fields)
    limit: Any = body.max_output_tokens
    return build.sampling_params(
        state.engine,
        fields,
        max_tokens=build.default_max_tokens(state.engine, None) if limit is None else limit,
        logprobs=(body.top_logprobs or 0) if wants_logprobs(body) else None,
    )


async def _begin_apart(state: ServerState, job: Job) -> Generation:
    """Return a generation that no client waits for.

    Raises:
        RequestError, EngineDeadError: the engine refuses it.
    """
    generation = Generation(state.engine, [job])
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(REFUSAL_SECONDS):
                await generation.start()
    except BaseException:
        generation.close()
        raise
    return generation


def _keep(store: ResponseStore, work: Work) -> None:
    if work.stored:
        store.add(work.record)


def _stream(record: Record, after: int, headers: dict[str, str], *, ends: bool) -> Response:
    """Return a stream of events; ``ends``: the response ends with the connection."""
    follower = record.follow(after)

    def close() -> None:
        follower.close()
        if ends:
            record.stop()

    return sse.EventStream(follower.events(), headers, close)
