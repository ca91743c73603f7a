"""Every field of every route, from the models of its requests, and values that no client should send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from jackfield.server.anthropic.types import CountRequest, MessagesRequest
from jackfield.server.openai.types import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestModel,
    TokenizeRequest,
)
from jackfield.server.pooling.types import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from jackfield.server.responses.types import ResponsesRequest

HI = [{"role": "user", "content": "hi"}]
DEEP = 10_000
MANY = 500_000
LONG = 5_000_000


@dataclass(frozen=True)
class Route:
    """A route, the model of its requests, and one that is right."""

    path: str
    model: type[RequestModel]
    body: dict[str, Any]
    pools: bool = False

    @property
    def anthropic(self) -> bool:
        return self.path.startswith("/v1/messages")


ROUTES = (
    Route("/v1/chat/completions", ChatCompletionRequest, {"messages": HI, "max_tokens": 1}),
    Route("/v1/completions", CompletionRequest, {"prompt": "hi", "max_tokens": 1}),
    Route("/v1/responses", ResponsesRequest, {"input": "hi", "max_output_tokens": 1}),
    Route("/v1/messages", MessagesRequest, {"messages": HI, "max_tokens": 1}),
    Route("/v1/messages/count_tokens", CountRequest, {"messages": HI}),
    Route("/tokenize", TokenizeRequest, {"prompt": "hi"}),
    Route("/detokenize", DetokenizeRequest, {"tokens": [104]}),
    Route("/v1/embeddings", EmbeddingRequest, {"input": "a"}, pools=True),
    Route("/pooling", PoolingRequest, {"input": "a"}, pools=True),
    Route("/classify", ClassifyRequest, {"input": "a"}, pools=True),
    Route("/score", ScoreRequest, {"text_1": "a", "text_2": "b"}, pools=True),
    Route("/rerank", RerankRequest, {"query": "a", "documents": ["b"]}, pools=True),
)

SMALL = (
    *("null", "true", "-1", "0", "1", "1e400", "NaN", "-Infinity", "3.5", str(10**30), str(-(2**63) - 1)),
    *("1" + "0" * 4000, "1" + "0" * 5000, '""', '"a"', '"\\ud800"', '"\\u0000\\u001b[2J\\u202e"', "[]", "{}"),
    *("[[]]", "[null]", "[{}]", '["a"]', '["\\udfff"]', "[-1]", "[0, 1e9]", "[true]", "[[1], [-1]]", '{"": NaN}'),
    *('{"type": null}', '{"type": ["text"]}', '{"type": "text"}', '{"a": {"b": 1e400}}', '{"999": 1, "-1": 1}'),
    *('{"1": 1' + "0" * 400 + "}", '[{"role": ["user"], "content": {}}]', '[{"role": "user", "content": [null]}]'),
    *('[{"type": "function", "function": {"name": "\\ud800"}}]', '[{"name": "f", "input_schema": {"a": NaN}}]'),
    *('[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]',),
    *('[{"role": "user", "content": "a"}, {"role": "assistant", "content": null, "tool_calls": 5}]',),
    '[{"type": "function_call_output", "call_id": [], "output": 5}]',
)
"""Values as JSON, some of which only some parsers take."""


def nested(opening: str, closing: str) -> str:
    """Return a value of many levels."""
    return opening * DEEP + "1" + closing * DEEP


def large(route: Route, name: str) -> Iterator[tuple[str, str]]:
    """Yield kinds of values that are large or deep, and the values; those that the field might take are the largest."""
    yield "deep lists", nested("[", "]")
    yield "deep objects", nested('{"a":', "}")
    yield "never closed", "[" * DEEP
    yield "many texts", MANY_TEXTS if takes(route, name, '["a"]') else LESS_TEXTS
    yield "long text", LONG_TEXT if takes(route, name, '"a"') else LESS_TEXT


def takes(route: Route, name: str, value: str) -> bool:
    """Return whether a field takes values of this kind."""
    return wrong_field(route, sent(route, name, value)) != name


def sent(route: Route, name: str, value: str) -> bytes:
    """Return a request in which one field has a value."""
    others = {key: kept for key, kept in route.body.items() if key != name}
    text = json.dumps(others)[:-1]
    return f"{text}{', ' if others else ''}{json.dumps(name)}: {value}}}".encode()


def wrong_field(route: Route, body: bytes) -> str | None:
    """Return the field that the request's model refuses, or None when it refuses none."""
    try:
        route.model.model_validate(json.loads(body))
    except ValidationError as error:
        return str(error.errors()[0]["loc"][0])
    return None


MANY_TEXTS, LESS_TEXTS = (json.dumps([f"s{number}" for number in range(count)]) for count in (MANY, MANY // 20))
LONG_TEXT, LESS_TEXT = ('"' + "a" * length + '"' for length in (LONG, LONG // 20))
