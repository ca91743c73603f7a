"""What the Messages API refuses, in the form that its clients know."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from api_calls import COUNT, HI, MESSAGES, TOOLS, message
from fake_engine import FakeEngine, get, make_app, post

from jackfield.errors import RequestError
from jackfield.server.errors import Fault, answer
from jackfield.server.operations.calls import current_call
from jackfield.server.operations.observe import Observe

TOOL = {"name": "add", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "t1", "name": "add", "input": {}}


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens: input should be a valid integer"),
    ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1"),
    ({"messages": []}, "messages: list should have at least 1 item after validation, not 0"),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages.0.role: a message has one of the roles"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0: the content of a message is a text or a list"),
    ({"temperature": 1.5}, "temperature: input should be less than or equal to 1"),
    ({"top_p": 0}, "top_p: top_p must be in (0, 1]"),
    ({"top_k": -3}, "top_k: top_k must be 0 or -1 (off) or a positive whole number"),
    ({"stop_sequences": [""]}, "stop_sequences: must be a list of at most 1024 texts, none of them empty"),
    ({"stop_sequences": ["x"] * 1025}, "stop_sequences: must be a list of at most 1024 texts"),
    ({"system": 5}, "system: must be a text or a list of text blocks"),
    ({"system": [{"type": "image"}]}, "system.0: the model takes text only, and this block is of type 'image'"),
    ({"priority": 1}, "priority: the server's scheduling policy 'fcfs' does not read priorities"),
    ({"container": "c"}, "container: code cannot be run here"),
    (
        {"context_management": {"edits": [1]}, "speed": "fast"},
        "context_management: conversations are not edited here; speed: there is one speed",
    ),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format: structured output is not"),
    ({"output_config": {"effort": "low"}}, "output_config.effort: the model's chat template does not read an effort"),
    ({"thinking": {"type": "adaptive"}}, "thinking: the model's chat template does not let it think"),
    ({"thinking": {"type": "deep"}}, "thinking.type: thinking is 'disabled', 'enabled' or 'adaptive'"),
    ({"tools": [TOOL]}, "tools: the model's chat template takes no tools"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type: tools of type 'web_search"),
    ({"tools": [{"name": "add"}]}, "tools.0: a tool has a name and an input_schema"),
    ({"tools": [{**TOOL, "strict": True}]}, "tools.0.strict: calls are not held to a schema yet"),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice: calls of tools cannot be forced yet"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice.disable_parallel_tool_use:"),
    (said({"type": "image", "source": {}}), "messages.0.content.0: the model takes text only"),
    (said({"type": "document"}), "messages.0.content.0: the model takes text only, and this block is of type 'doc"),
    (said({"type": "txt"}), "messages.0.content.0.type: a content block needs a known type; did you mean 'text'?"),
    (said("text"), "messages.0.content.0.type: a content block needs a known type"),
    (said({"type": "text", "text": 5}), "messages.0.content.0.text: a block of type 'text' holds a text"),
    (said(CALL), "messages.0.content.0.type: a message of the user has no blocks of type 'tool_use'"),
    (
        said(CALL, role="assistant"),
        "messages.0.content.0: the model's chat template takes no blocks of type 'tool_use'",
    ),
    (
        said({"type": "tool_result"}),
        "messages.0.content.0: the model's chat template takes no blocks of type 'tool_res",
    ),
    ({"messages": [{"role": "user", "content": "a" * 300}]}, "messages: the prompt has 318 tokens, but the context"),
    ({"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood: the chat template does not read this variable"),
]


@pytest.mark.parametrize(("fields", "text"), BAD, ids=[text[:50] for _, text in BAD])
def test_what_cannot_be_honoured_is_named(fields: dict[str, Any], text: str) -> None:
    response = post(FakeEngine(), MESSAGES, message(**fields))
    body = response.json()
    assert response.status_code == 400 and set(body) == {"type", "error"} and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(text)


WITH_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"messages": [*HI, *said(CALL, role="assistant")["messages"]]}, "messages.1: a last message of the assistant is"),
    (said({"type": "tool_result"}), "messages.0.content.0.tool_use_id: a tool_result block names its call"),
    (
        said({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}),
        "messages.0.content.0.content.0: the model takes text only",
    ),
    (said({"type": "tool_use", "name": "x"}, role="assistant"), "messages.0.content.0: a tool_use block has a name"),
    ({"thinking": {"type": "enabled", "budget_tokens": 20}}, "thinking.budget_tokens: a budget for thinking below"),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display: thoughts are a part of the text"),
]


@pytest.mark.parametrize(("fields", "text"), WITH_TOOLS, ids=[text[:50] for _, text in WITH_TOOLS])
def test_what_a_template_for_tools_does_not_help(fields: dict[str, Any], text: str) -> None:
    response = post(FakeEngine(template=TOOLS), MESSAGES, message(**fields))
    assert (response.status_code, response.json()["error"]["message"][: len(text)]) == (400, text)


def test_values_that_ask_for_nothing_pass() -> None:
    fields: dict[str, Any] = {
        "container": None,
        "context_management": {"edits": []},
        "speed": "standard",
        "mcp_servers": [],
    }
    fields |= {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}, "tool_choice": {"type": "auto"}}
    assert post(FakeEngine(), MESSAGES, message(**fields)).status_code == 200


def test_unknown_models_and_paths() -> None:
    found = post(FakeEngine(), MESSAGES, message(model="claude"))
    assert (found.status_code, found.json()["error"]["type"]) == (404, "not_found_error")
    found = post(FakeEngine(), COUNT, {"messages": HI, "model": "claude"})
    assert (found.status_code, found.json()["error"]["type"]) == (404, "not_found_error")
    found = get(FakeEngine(), MESSAGES)
    assert (found.status_code, found.json()["type"]) == (405, "error")
    found = post(FakeEngine(), MESSAGES, b"{")
    assert found.json()["error"]["message"].startswith("the body is no JSON")


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_an_overload(stream: bool) -> None:
    full = RequestError("too many requests are waiting", field="scheduler.max_waiting", value=1, remedy="try again")
    response = post(FakeEngine(fail_after=0, error=full), MESSAGES, message(stream=stream))
    assert (response.status_code, response.headers["retry-after"]) == (529, "1")
    assert response.json()["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_each_status_has_the_apis_own_type(status: int, kind: str) -> None:
    response = answer(Fault(status, "no"), MESSAGES)
    assert response.status_code == status and f'"type":"{kind}"'.encode() in bytes(response.body)


@pytest.mark.parametrize("path", ["/llm/v1/messages", "/v1/messages"])
def test_a_proxys_prefix_does_not_change_the_shape(path: str) -> None:
    response = post(FakeEngine(), path, {"messages": HI}, root_path="/llm")
    assert (response.status_code, response.json()["error"]["message"]) == (400, "max_tokens: field required")
    assert response.json()["type"] == "error"


def test_an_error_tells_the_id_of_its_request() -> None:
    sent: list[Any] = []

    async def send(part: Any) -> None:
        sent.append(part)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"mine")]
    scope = {"type": "http", "method": "POST", "path": MESSAGES, "headers": headers, "query_string": b""}
    asyncio.run(Observe(make_app(FakeEngine()))(scope, receive, send))
    assert b'"request_id":"mine"' in sent[1]["body"] and current_call.get() is None
