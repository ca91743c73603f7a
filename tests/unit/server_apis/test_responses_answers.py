"""Responses and their events have the forms of the official client's own types."""

from __future__ import annotations

from typing import Any

import pytest
from api_calls import CHAT, RESPONSES, TOOLS, named_events, prompt_of
from fake_engine import FakeEngine, post
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from jackfield.errors import EngineDeadError, RequestError

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


def ask(**fields: Any) -> dict[str, Any]:
    return {"input": "hi", **fields}


def lasting(body: dict[str, Any]) -> dict[str, Any]:
    """Return a response without what differs from one to the next."""
    item = {**body["output"][0], "id": ""}
    return {**body, "id": "", "created_at": 0, "completed_at": 0, "output": [item]}


def test_a_response_has_the_clients_form() -> None:
    body = post(FakeEngine("Hello"), RESPONSES, ask(metadata={"a": "b"}, instructions="Be good.")).json()
    response = Response.model_validate(body, strict=True)
    assert response.output_text == "Hello" and response.status == "completed" and response.error is None
    assert (response.instructions, response.metadata, response.temperature) == ("Be good.", {"a": "b"}, 1.0)
    usage = response.usage
    assert usage is not None and (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (37, 6, 43)
    assert usage.input_tokens_details.cached_tokens == 3


def test_events_are_numbered_and_in_order() -> None:
    events = named_events(post(FakeEngine("Hey"), RESPONSES, ask(stream=True)))
    assert [event["type"] for event in events] == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *["response.output_text.delta"] * 3,
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(11))
    for event in events:
        assert EVENT.validate_python(event, strict=True).type == event["type"]
    assert [event["response"]["status"] for event in events[:2]] == ["in_progress"] * 2
    assert events[2]["item"]["id"] == events[-1]["response"]["output"][0]["id"]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, "completed"),
        ({"max_output_tokens": 2}, "incomplete"),
        ({"stop": "lo"}, "completed"),
        (LOGPROBS, "completed"),
    ],
)
def test_p1_a_stream_adds_up_to_the_whole(fields: dict[str, Any], status: str) -> None:
    whole = post(FakeEngine("Hello"), RESPONSES, ask(**fields)).json()
    events = named_events(post(FakeEngine("Hello"), RESPONSES, ask(**fields, stream=True)))
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == (f"response.{status}", status)
    assert lasting(last["response"]) == lasting(whole)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    part = whole["output"][0]["content"][0]
    assert "".join(event["delta"] for event in deltas) == part["text"] != ""
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
    assert (events[-4]["text"], events[-4]["logprobs"]) == (part["text"], part["logprobs"])
    assert len(part["logprobs"]) == (5 if "include" in fields else 0)
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    assert whole["incomplete_details"] == details and whole["output"][0]["status"] == status


def test_log_probabilities() -> None:
    body = post(FakeEngine("H"), RESPONSES, ask(**LOGPROBS)).json()
    Response.model_validate(body, strict=True)
    assert body["output"][0]["content"][0]["logprobs"] == [
        {
            "token": "H",
            "logprob": -1.0,
            "bytes": [72],
            "top_logprobs": [{"token": "A", "logprob": -0.5, "bytes": [65]}],
        }
    ]


def test_an_error_in_mid_stream_fails_the_response() -> None:
    engine = FakeEngine("Hello", fail_after=2, error=EngineDeadError("the engine process ended"))
    last = named_events(post(engine, RESPONSES, ask(stream=True)))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine process ended"}
    assert last["response"]["output"][0]["content"][0]["text"] == "He"
    EVENT.validate_python(last, strict=True)
    assert not engine.living


@pytest.mark.parametrize("how", [{}, {"stream": True}, {"background": True}])
def test_what_the_engine_refuses_is_an_error_before_any_event(how: dict[str, bool]) -> None:
    full = RequestError("too many requests are waiting", field="scheduler.max_waiting", value=1, remedy="try again")
    response = post(FakeEngine(fail_after=0, error=full), RESPONSES, ask(**how))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")


def test_items_are_written_as_openais_messages_are() -> None:
    ours, theirs = FakeEngine(template=TOOLS, max_model_len=2000), FakeEngine(template=TOOLS, max_model_len=2000)
    items = [
        {"role": "developer", "content": "Be good."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "add"}]},
        {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "Let me."}]},
        {"type": "function_call", "call_id": "t1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "t1", "output": "2"},
    ]
    tool = {
        "type": "function",
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object"},
        "strict": False,
    }
    assert post(ours, RESPONSES, {"input": items, "tools": [tool]}).status_code == 200
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    same = [
        {"role": "system", "content": "Be good."},
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "Let me.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
    ]
    body = {"messages": same, "tools": [{"type": "function", "function": function}]}
    assert post(theirs, CHAT, body).status_code == 200
    assert ours.prompts == theirs.prompts
    hidden = FakeEngine(template=TOOLS, max_model_len=2000)
    post(hidden, RESPONSES, {"input": items, "tools": [tool], "tool_choice": "none"})
    assert "Adds." in prompt_of(ours) and "Adds." not in prompt_of(hidden)


def test_fields_reach_the_engine() -> None:
    engine = FakeEngine(policy="priority")
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop": ["X"], "seed": 3, "max_output_tokens": 7}
    more = {"user": "me", "prompt_cache_key": "k", "include": ["reasoning.encrypted_content"], "novelty": 1}
    answer = post(engine, RESPONSES, ask(**fields, **more, priority=4, cache_salt="s"), policy="priority")
    assert answer.headers["x-jackfield-ignored"] == "novelty"
    params = engine.params[0]
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.5, 0.9, 5, ["X"])
    assert (params.seed, params.max_tokens, engine.priorities, engine.salts) == (3, 7, [4], ["s"])


def test_truncation_drops_the_oldest_messages() -> None:
    items = [{"role": "system", "content": "S"}]
    for number in range(20):
        items += [{"role": "user", "content": f"q{number:02}"}, {"role": "assistant", "content": "a"}]
    items.append({"role": "user", "content": "last"})
    whole = post(FakeEngine(), RESPONSES, {"input": items}).json()["error"]
    assert whole["param"] == "input" and "but the context holds 256" in whole["message"]
    engine = FakeEngine()
    assert post(engine, RESPONSES, {"input": items, "truncation": "auto", "max_output_tokens": 20}).status_code == 200
    prompt = prompt_of(engine)
    assert prompt.startswith("<s>system:S\n<s>user:q") and prompt.endswith("<s>user:last\n<s>assistant:")
    pair = len("<s>user:q00\n<s>assistant:a\n") - 4
    assert 256 - 20 - pair < len(engine.prompts[0]) <= 256 - 20, "one more pair would not have fitted"
    long = [{"role": "user", "content": "a" * 300}]
    assert post(FakeEngine(), RESPONSES, {"input": long, "truncation": "auto"}).status_code == 400


def message(*parts: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "input: must be a text or a list of 1 to 10000 items"),
    ({"input": []}, "input", "input: must be a text or a list of 1 to 10000 items"),
    ({"input": [{"type": "mesage"}]}, "input.0.type", "an item needs a known type; did you mean 'message'?"),
    ({"input": [{"type": "reasoning"}]}, "input.0", "items of type 'reasoning' are not available"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "a message has one of the roles"),
    ({"input": [{"role": "user"}]}, "input.0.content", "the content of a message is a text or a list of parts"),
    ({"input": [{"type": "function_call", "call_id": "c"}]}, "input.0.name", "a function_call has a text name"),
    ({"input": [{"type": "function_call_output", "output": ""}]}, "input.0.call_id", "a function_call_output has a"),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]},
        "input",
        "the model's chat template takes no items of type 'function_call'",
    ),
    (message({"type": "input_image"}), "input.0.content.0", "the model takes text only"),
    (message({"type": "input_text", "text": 5}), "input.0.content.0.text", "a text part holds a text"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens: input should be greater than or equal to 1"),
    ({"max_output_tokens": 1000}, "max_output_tokens", "the prompt has 20 tokens and max_output_tokens is 1000"),
    ({"temperature": -1}, "temperature", "temperature must be a finite number"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", "structured output is not available yet"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "the type of text.format is 'text'"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "text.verbosity: verbosity is not available"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort", "the model's chat template does not read an effort"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "reasoning.summary: there are no summaries"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "tools of type 'web_search' are not run here"),
    ({"tools": [{"type": "function"}]}, "tools.0.name", "a function has a name"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools", "the model's chat template takes no tools"),
    ({"tools": [{"type": "function", "name": "f", "strict": True}]}, "tools.0.strict", "tools.0.strict: calls are"),
    ({"tool_choice": "required"}, "tool_choice", "calls of tools cannot be forced yet"),
    ({"include": ["message.output_text.logprob"]}, "include.0", "there is nothing of this name; did you mean"),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs 'message.output_text.logprobs' in include"),
    ({"include": LOGPROBS["include"], "top_logprobs": 21}, "top_logprobs", "top_logprobs must be a whole number from"),
    ({"stream_options": {}}, "stream_options", "stream_options needs a stream"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "stream_",
    ),
    ({"background": True, "store": False}, "background", "a response in the background must be stored"),
    ({"conversation": "c"}, "conversation", "conversation: conversations are not kept"),
    ({"prompt": {"id": "p"}}, "prompt", "prompt: prompts of a library are not available"),
    ({"truncation": "some"}, "truncation", "truncation: input should be 'auto' or 'disabled'"),
    ({"priority": 1}, "priority", "the server's scheduling policy 'fcfs' does not read priorities"),
]


@pytest.mark.parametrize(("fields", "param", "text"), BAD, ids=[f"{param}-{text[:30]}" for _, param, text in BAD])
def test_what_cannot_be_honoured_is_named(fields: dict[str, Any], param: str, text: str) -> None:
    response = post(FakeEngine(), RESPONSES, ask(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(text)
