"""``/v1/embeddings``, ``/pooling``, ``/classify``, ``/score`` and ``/rerank``."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from jackfield.engine.pooling import similarity
from jackfield.errors import RequestError
from jackfield.protocol import PoolingParams
from jackfield.server.extra import fields_renamed
from jackfield.server.openai.answers import ERRORS
from jackfield.server.openai.common import json_response
from jackfield.server.openai.unknown import ignored_header
from jackfield.server.pooling import types as t
from jackfield.server.pooling import work
from jackfield.server.state import state_of

router = APIRouter(tags=["Pooling"])


@router.post("/v1/embeddings", response_model=t.Embeddings, responses=ERRORS)
async def create_embeddings(body: t.EmbeddingRequest, request: Request) -> Response:
    """Return one embedding for each text."""
    model, batch, outputs = await _pooled(body, request, "embed", dimensions=body.dimensions, normalize=body.normalize)
    data = [
        {"object": "embedding", "index": place, "embedding": work.encoded(output.data, body.encoding_format)}
        for place, output in enumerate(outputs)
    ]
    return json_response(work.listed("embd", model, data, batch), ignored_header(body))


@router.post("/pooling", response_model=t.PooledList, responses=ERRORS)
async def pool(body: t.PoolingRequest, request: Request) -> Response:
    """Return what the model makes of the hidden states of each text."""
    names = ("dimensions", "normalize", "activation", "step_tag_id", "returned_token_ids")
    settings = {name: getattr(body, name) for name in names}
    model, batch, outputs = await _pooled(body, request, body.task, **settings)
    data = [
        {
            "object": "pooling",
            "index": place,
            "shape": list(output.data.shape),
            "data": work.encoded(output.data, body.encoding_format),
        }
        for place, output in enumerate(outputs)
    ]
    return json_response(work.listed("pool", model, data, batch), ignored_header(body))


@router.post("/classify", response_model=t.Labels, responses=ERRORS)
async def classify(body: t.ClassifyRequest, request: Request) -> Response:
    """Return scores of labels for each text."""
    with fields_renamed(task="model"):
        model, batch, outputs = await _pooled(
            body, request, "classify", activation=body.activation, returned_token_ids=body.returned_token_ids
        )
    data = [
        {
            "object": "classification",
            "index": place,
            "label": int(output.data.argmax()),
            "probs": output.data.tolist(),
            "num_classes": len(output.data),
        }
        for place, output in enumerate(outputs)
    ]
    return json_response(work.listed("clas", model, data, batch), ignored_header(body))


@router.post("/score", response_model=t.Scores, responses=ERRORS)
@router.post("/v1/score", response_model=t.Scores, responses=ERRORS)
async def score(body: t.ScoreRequest, request: Request) -> Response:
    """Return how well texts fit together, pair by pair: the model's score of both, or the cosine of embeddings."""
    model = work.check(state_of(request), body)
    (left, lefts), (right, rights) = _side(body, "text_1", "queries"), _side(body, "text_2", "documents")
    if len(lefts) not in (1, len(rights)):
        raise RequestError(
            f"{len(lefts)} texts cannot be paired with {len(rights)}",
            field=left,
            value=len(lefts),
            remedy=f"give one text, or as many as in {right}",
        )
    fields = [f"{left}.{n}" for n in range(len(lefts))], [f"{right}.{n}" for n in range(len(rights))]
    batch, scores = await _scored(body, request, (lefts, rights), fields)
    data = [{"object": "score", "index": place, "score": value} for place, value in enumerate(scores)]
    return json_response(work.listed("score", model, data, batch), ignored_header(body))


@router.post("/rerank", response_model=t.Ranking, response_model_exclude_none=True, responses=ERRORS)
@router.post("/v1/rerank", response_model=t.Ranking, response_model_exclude_none=True, responses=ERRORS)
async def rerank(body: t.RerankRequest, request: Request) -> Response:
    """Order documents by how well they answer a query."""
    answer = await _rank(body, request, shown=body.return_documents is not False)
    return json_response(answer, ignored_header(body))


@router.post("/v2/rerank", response_model=t.Ranking, response_model_exclude_none=True, responses=ERRORS)
async def rerank_2(body: t.RerankRequest, request: Request) -> Response:
    """As `/v1/rerank`, for clients of Cohere's API."""
    answer = await _rank(body, request, shown=bool(body.return_documents))
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    return json_response({**answer, "meta": meta}, ignored_header(body))


async def _pooled(
    body: t.EmbeddingRequest | t.ClassifyRequest, request: Request, task: str, **settings: Any
) -> tuple[str, list[list[int]], Sequence[Any]]:
    """Return the name of the model, the prompts and their results."""
    state = state_of(request)
    model = work.check(state, body)
    with work.fields_of_params():
        params = PoolingParams(task=task, **settings)  # type: ignore[arg-type]  # pydantic checked the task
    texts = work.inputs(body.input)
    fields = ["input"] if len(texts) == 1 else [f"input.{place}" for place in range(len(texts))]
    batch = await work.prompts(state, body, texts, fields)
    return model, batch, await work.pooled(state, body, batch, params, request)


def _side(body: t.ScoreRequest, first: str, second: str) -> tuple[str, list[str]]:
    """Return the name of the field that holds one side of the pairs, and its texts."""
    given = [(name, value) for name in (first, second) if (value := getattr(body, name)) is not None]
    if len(given) != 1:
        raise RequestError(f"give either {first} or {second}", field=first, remedy="give one of them")
    name, texts = given[0]
    return name, [texts] if isinstance(texts, str) else texts


async def _rank(body: t.RerankRequest, request: Request, *, shown: bool) -> dict[str, Any]:
    model = work.check(state_of(request), body)
    fields = [f"documents.{place}" for place in range(len(body.documents))]
    texts = [_document(document, field) for document, field in zip(body.documents, fields, strict=True)]
    sides = ([body.query], texts), (["query"], fields)
    batch, scores = await _scored(body, request, *sides, body.max_tokens_per_doc)
    order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))[: body.top_n]
    results: list[dict[str, Any]] = [{"index": place, "relevance_score": scores[place]} for place in order]
    if shown:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    return {"id": f"rerank-{uuid.uuid4().hex}", "model": model, "results": results, "usage": work.usage(batch)}


Sides = tuple[list[str], list[str]]


async def _scored(
    body: t.ScoreRequest | t.RerankRequest, request: Request, texts: Sides, fields: Sides, keep: int | None = None
) -> tuple[list[list[int]], list[float]]:
    """Return the prompts and the scores of pairs.

    Args:
        texts, fields: of the left side (one for all, or as many as on the right) and of the right side. keep: tokens
            of each text on the right.
    """
    state, (lefts, rights) = state_of(request), texts
    if work.reads_pairs(state):
        together, places = _paired(texts), _paired(fields)
        batch, types = await work.pairs(state, body, together, places, keep)
        outputs = await work.pooled(state, body, batch, PoolingParams(task="classify"), request, types)
        return batch, [float(output.data[0]) for output in outputs]
    batch = await work.prompts(state, body, lefts, fields[0])
    batch += await work.prompts(state, body, rights, fields[1], keep)
    params = PoolingParams(task="token_embed" if work.compares_tokens(state) else "embed")
    outputs = await work.pooled(state, body, batch, params, request)
    first, second = outputs[: len(lefts)], outputs[len(lefts) :]
    first = first * len(second) if len(first) == 1 else first
    return batch, [similarity(one.data, other.data) for one, other in zip(first, second, strict=True)]


def _paired(sides: Sides) -> list[tuple[str, str]]:
    lefts, rights = sides
    return list(zip(lefts * len(rights) if len(lefts) == 1 else lefts, rights, strict=True))


def _document(document: t.Document, place: str) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise RequestError("a document is a text, or an object with a text", field=place, remedy="send a text")
    return text
