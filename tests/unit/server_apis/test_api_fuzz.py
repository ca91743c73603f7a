"""No field of any of these APIs can be given a value that breaks the server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from api_calls import COUNT, HI, MESSAGES, RESPONSES, TOOLS, PoolEngine, message, run
from fake_engine import FakeEngine, client

from jackfield.server.anthropic.types import CountRequest, MessagesRequest
from jackfield.server.openai.types import RequestModel
from jackfield.server.pooling.types import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from jackfield.server.responses.types import ResponsesRequest

ROUTES: list[tuple[str, type[RequestModel], dict[str, Any]]] = [
    (MESSAGES, MessagesRequest, message()),
    (COUNT, CountRequest, {"messages": HI}),
    (RESPONSES, ResponsesRequest, {"input": "hi"}),
    ("/v1/embeddings", EmbeddingRequest, {"input": "a"}),
    ("/pooling", PoolingRequest, {"input": "a"}),
    ("/classify", ClassifyRequest, {"input": "a"}),
    ("/score", ScoreRequest, {"text_1": "a", "text_2": "b"}),
    ("/rerank", RerankRequest, {"query": "a", "documents": ["b"]}),
]
ODD = (
    *("null", "true", "-1", "0", "1", "1e400", "NaN", "-Infinity", "3.5", str(10**30), str(-(2**63) - 1)),
    *('""', '"a"', '"\\ud800"', '"\\u0000"', "[]", "{}", "[[]]", "[null]", "[{}]", '["a"]', "[-1]", "[0, 1e9]"),
    *('{"type": null}', '{"type": []}', '{"type": "text"}', '{"a": {"b": NaN}}', '[{"type": ["x"]}]'),
    *('[{"role": "user"}]', '[{"role": ["user"], "content": {}}]', '[{"role": "user", "content": [{"type": "text"}]}]'),
    *('[{"role": "assistant", "content": [{"type": "tool_use", "id": [], "name": "f", "input": {}}]}]',),
    *('[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": 5}]}]',),
    *('[{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]', '[{"id": 5, "role": "user"}]'),
    *('[{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text"}]}]', '{"format": []}'),
    *('{"effort": []}', '{"effort": "low"}', '{"type": "enabled", "budget_tokens": []}', '{"name": 5, "type": 1}'),
    *('[{"name": "f", "input_schema": {"a": 1e400}}]', '[{"type": "function", "name": "\\ud800"}]', "[" * 2000),
    '[{"type": "function", "name": "f", "input_schema": ' + '{"a": ' * 800 + "1" + "}" * 800 + "}]",
    '["' + "\\ud800" + '"]',
    '[{"role": "user", "id": "\\ud800", "content": "a"}]',
)


@pytest.mark.parametrize(("path", "model", "body"), ROUTES, ids=[path for path, _, _ in ROUTES])
def test_no_value_of_a_field_breaks_the_server(path: str, model: type[RequestModel], body: dict[str, Any]) -> None:
    async def test() -> None:
        text = path in (MESSAGES, COUNT, RESPONSES)
        engine = FakeEngine("Hello", template=TOOLS, max_model_len=512) if text else PoolEngine(max_model_len=512)
        async with client(engine) as http:
            for name in model.model_fields:
                others = json.dumps({key: value for key, value in body.items() if key != name})[:-1]
                for value in ODD:
                    comma = "" if others == "{" else ", "
                    sent = f'{others}{comma}"{name}": {value}}}'.encode()
                    answer = await http.post(path, content=sent, headers={"content-type": "application/json"})
                    assert answer.status_code in (200, 400, 404), (name, value, answer.text)
                    if answer.status_code != 200:
                        assert answer.json()["error"]["message"], (name, value)
        assert not engine.living

    run(test, 60)
