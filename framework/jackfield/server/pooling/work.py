"""Texts go to the engine all together, and what comes back keeps their order."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
from fastapi import Request

from jackfield.engine.input_processor import Prompt
from jackfield.engine.outputs import PoolingOutput
from jackfield.errors import JackfieldError, RequestError
from jackfield.protocol import PoolingParams
from jackfield.server.engine_view import Engine
from jackfield.server.extra import moved, refuse
from jackfield.server.generation import until_gone
from jackfield.server.openai import params as build
from jackfield.server.openai.types import SamplingFields
from jackfield.server.pooling.types import REFUSED, PooledFields
from jackfield.server.state import ServerState
from jackfield.server.text import check_text, encode

Text = str | list[int]
Floats = npt.NDArray[np.float32]
Types = Sequence[list[int]] | None


class PoolingEngine(Protocol):
    """What these routes need of an engine besides :class:`Engine`."""

    @property
    def labels(self) -> int:
        """How many labels the model scores."""

    @property
    def late_interaction(self) -> bool:
        """Whether texts are compared token by token."""

    @property
    def token_types(self) -> int:
        """How many types of tokens the model tells apart; 0 or 1: none."""

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> PoolingOutput:
        """Return what is made of the hidden states of a prompt; cancelling ends the request."""


def check(state: ServerState, body: PooledFields) -> str:
    """Refuse what cannot be honoured, and return the name of the model.

    Raises:
        RequestError, ModelNotServedError: names the field.
    """
    fields = SamplingFields.model_construct(
        model=body.model, priority=body.priority, truncate_prompt_tokens=body.truncate_prompt_tokens
    )
    build.check_common(state, fields)
    refuse(body, REFUSED)
    return state.check_model(body.model)


def inputs(given: Any) -> list[Text]:
    """Return an input as a list of texts or of lists of ids."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


async def prompts(
    state: ServerState, body: PooledFields, texts: Sequence[Text], fields: Sequence[str], keep: int | None = None
) -> list[list[int]]:
    """Return the ids of texts.

    Args:
        fields: the place of each text in the request. keep: tokens of each; of the request when None.

    Raises:
        RequestError: a text is empty, or does not fit into the context.
    """
    made = []
    for text, field in zip(texts, fields, strict=True):
        made.append(await _ids(state.engine, body, text, field, keep or body.truncate_prompt_tokens))
        # Many texts take long; others get their turn in between.
        await asyncio.sleep(0)
    return made


def reads_pairs(state: ServerState) -> bool:
    """Return whether the model scores two texts that it reads together."""
    return cast(PoolingEngine, state.engine).labels == 1


def compares_tokens(state: ServerState) -> bool:
    """Return whether texts are compared token by token."""
    return cast(PoolingEngine, state.engine).late_interaction


async def pairs(
    state: ServerState,
    body: PooledFields,
    texts: Sequence[tuple[str, str]],
    fields: Sequence[tuple[str, str]],
    keep_second: int | None = None,
) -> tuple[list[list[int]], Types]:
    """Return the ids of two texts that are read together, and their types.

    Args:
        texts: pairs. fields: the place of each text in the request. keep_second: tokens of each second text.

    Raises:
        RequestError: a text is empty, or a pair does not fit into the context.
    """
    engine, made, types = state.engine, [], []
    keep = engine.max_model_len if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    for pair, places in zip(texts, fields, strict=True):
        for text, field in zip(pair, places, strict=True):
            check_text(engine, text, field)
            if not text:
                raise _unfit(0, engine.max_model_len, field)
        encode_both = partial(engine.tokenizer.encode_pair, keep=keep, keep_pair=keep_second)
        ids, kinds = await asyncio.to_thread(encode_both, *pair, body.add_special_tokens)
        if len(ids) > engine.max_model_len:
            raise _unfit(len(ids), engine.max_model_len, places[1])
        made.append(ids)
        types.append(kinds)
    return made, types if cast(PoolingEngine, engine).token_types > 1 else None


async def pooled(
    state: ServerState,
    body: PooledFields,
    batch: Sequence[list[int]],
    params: PoolingParams,
    request: Request,
    types: Types = None,
) -> list[PoolingOutput]:
    """Return the results of prompts, in their order.

    Args:
        types: of the tokens of each prompt, for models that tell them apart.

    Raises:
        ClientGoneError: the client left. RequestError, EngineDeadError: of any of the prompts; the others are ended.
    """
    engine, name = cast(PoolingEngine, state.engine), f"pool-{uuid.uuid4().hex}"

    async def one(place: int, ids: list[int]) -> PoolingOutput:
        prompt: dict[str, Any] = {"prompt_token_ids": ids, "cache_salt": body.cache_salt or ""}
        if types is not None:
            prompt["token_type_ids"] = types[place]
        return await engine.encode(prompt, params, f"{name}-{place}", priority=body.priority or 0)

    async def everything() -> list[PoolingOutput]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(place, ids)) for place, ids in enumerate(batch)]
        return [task.result() for task in tasks]

    try:
        with fields_of_params():
            outputs = await until_gone(request, everything())
    except ExceptionGroup as failed:
        raise _named(failed.exceptions[0]) from None
    for output in outputs:
        if not np.isfinite(output.data).all():
            raise JackfieldError("the model made numbers that are not finite")
    return outputs


@contextmanager
def fields_of_params() -> Iterator[None]:
    """Let errors name parameters as the request does."""
    try:
        yield
    except RequestError as error:
        raise _named(error) from error


def encoded(data: Floats, form: str) -> Any:
    """Return numbers as lists, or as base64 of little-endian 32-bit floats."""
    return base64.b64encode(data.astype("<f4").tobytes()).decode() if form == "base64" else data.tolist()


def usage(batch: Sequence[list[int]]) -> dict[str, int]:
    """Return the tokens of prompts."""
    tokens = sum(map(len, batch))
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def listed(prefix: str, model: str, data: list[Any], batch: Sequence[list[int]]) -> dict[str, Any]:
    """Return a list of results."""
    head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": model}
    return {**head, "data": data, "usage": usage(batch)}


def _named(error: Exception) -> Exception:
    if not isinstance(error, RequestError):
        return error
    if (error.field or "").startswith("prompt"):
        return moved(error, error.field or "", "input")
    return moved(error, "pooling_params.", "") if (error.field or "").startswith("pooling_params.") else error


async def _ids(engine: Engine, body: PooledFields, text: Text, field: str, keep: int | None) -> list[int]:
    limit = engine.max_model_len
    keep = limit if keep == -1 else keep
    special = body.add_special_tokens
    ids = text if isinstance(text, list) else await encode(engine, text, special=special, field=field)
    if keep is not None and len(ids) > keep:
        ids = ids[:keep] if isinstance(text, list) else await _cut(engine, text, ids, keep, field)
    if not ids or len(ids) > limit:
        raise _unfit(len(ids), limit, field)
    return ids


def _unfit(tokens: int, limit: int, field: str) -> RequestError:
    if not tokens:
        return RequestError("the text is empty", field=field, value="", remedy="send at least one token")
    return RequestError(
        f"the text has {tokens} tokens, but the context holds {limit}",
        field=field,
        value=tokens,
        remedy="shorten it, or set truncate_prompt_tokens",
    )


async def _cut(engine: Engine, text: str, ids: list[int], keep: int, field: str) -> list[int]:
    """Return the first tokens of a text between those that the tokenizer puts around it."""
    bare = await encode(engine, text, special=False, field=field)
    around = len(ids) - len(bare)
    before = next((n for n in range(around + 1) if ids[n : n + len(bare)] == bare), None)
    if before is None or keep <= around:
        return ids[:keep]
    return [*ids[:before], *bare[: keep - around], *ids[before + len(bare) :]]
