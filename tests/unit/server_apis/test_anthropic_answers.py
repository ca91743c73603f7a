"""Answers, streams and prompts of the Messages API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from api_calls import CHAT, COUNT, HI, MESSAGES, RESPONSES, TOOLS, message, named_events, prompt_of, run
from fake_engine import FakeEngine, post
from test_server_disconnect import Connection, Hasty, until

from jackfield.errors import EngineDeadError
from jackfield.server.anthropic.types import Message

CALL = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def joined(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")


def test_an_answer_has_the_documented_form() -> None:
    body = post(FakeEngine("Hello"), MESSAGES, message()).json()
    Message.model_validate(body, strict=True)
    assert body.pop("id").startswith("msg_")
    prompt = len("user:hi\n") + len("assistant:") + 2
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "fake/model",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt - 3,
            "cache_read_input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "output_tokens": 6,
        },
    }


def test_a_stream_has_the_events_in_order() -> None:
    events = named_events(post(FakeEngine("Hey"), MESSAGES, message(stream=True)))
    assert [event["type"] for event in events] == [
        *("message_start", "content_block_start", "ping"),
        *["content_block_delta"] * 3,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    assert events[1] == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert [event["delta"] for event in events[3:6]] == [{"type": "text_delta", "text": text} for text in "Hey"]


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({}, "end_turn", None, "Hello"),
        ({"max_tokens": 2}, "max_tokens", None, "He"),
        ({"stop_sequences": ["X", "lo"]}, "stop_sequence", "lo", "Hel"),
        ({"messages": [{"role": "user", "content": "a" * 235}]}, "model_context_window_exceeded", None, "Hel"),
    ],
)
def test_j158_p1_a_stream_ends_as_the_whole_answer_does(
    fields: dict[str, Any], reason: str, sequence: str | None, text: str
) -> None:
    whole = post(FakeEngine("Hello"), MESSAGES, message(**fields)).json()
    events = named_events(post(FakeEngine("Hello"), MESSAGES, message(**fields, stream=True)))
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert whole["content"] == [{"type": "text", "text": text}] and joined(events) == text
    assert events[-2]["usage"] == whole["usage"]


def test_j160_usage_is_there_from_the_start() -> None:
    events = named_events(post(FakeEngine("Hello"), MESSAGES, message(stream=True)))
    start, end = events[0]["message"]["usage"], events[-2]["usage"]
    total = post(FakeEngine(), COUNT, {"messages": HI}).json()["input_tokens"]
    for usage in (start, end):
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == total
    assert (start["output_tokens"], end["output_tokens"]) == (0, 6)


def test_j156_tool_blocks_are_written_as_openais_messages_are() -> None:
    ours, theirs = FakeEngine(template=TOOLS, max_model_len=2000), FakeEngine(template=TOOLS, max_model_len=2000)
    turns = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me."}, CALL]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "Go on."}]},
        {"role": "assistant", "content": [{"type": "text", "text": "It is 2."}]},
        {"role": "user", "content": "Thanks"},
    ]
    assert post(ours, MESSAGES, message(messages=turns, tools=[TOOL])).status_code == 200
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    same = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "Let me.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "It is 2."},
        {"role": "user", "content": "Thanks"},
    ]
    body = {"messages": same, "tools": [{"type": "function", "function": function}]}
    assert post(theirs, CHAT, body).status_code == 200
    assert ours.prompts == theirs.prompts and b"It is 2." in bytes(i for i in ours.prompts[0] if i < 256)


def test_errors_of_tools_reach_the_model() -> None:
    engine = FakeEngine(template=TOOLS, max_model_len=2000)
    turns = [*HI, {"role": "assistant", "content": [CALL]}]
    turns.append({"role": "user", "content": [{**RESULT, "content": "no such file", "is_error": True}]})
    post(engine, MESSAGES, message(messages=turns))
    assert "<s>tool:Error: no such filet1\n" in prompt_of(engine)


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "none"}, None])
def test_tool_choice_none_hides_the_tools(choice: dict[str, str] | None) -> None:
    engine = FakeEngine(template=TOOLS, max_model_len=2000)
    assert post(engine, MESSAGES, message(tools=[TOOL], tool_choice=choice)).status_code == 200
    assert ("Adds." in prompt_of(engine)) == (choice != {"type": "none"})


def test_system_prompts_and_turns_of_one_role() -> None:
    system = [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "good."}]
    for given, written in (("Be good.", "Be good."), (system, "Be\ngood.")):
        engine = FakeEngine()
        turns = [*HI, {"role": "user", "content": [{"type": "text", "text": "you"}]}]
        post(engine, MESSAGES, message(system=given, messages=turns))
        assert prompt_of(engine) == f"<s>system:{written}\n<s>user:hi\nyou\n<s>assistant:"


def test_a_last_message_of_the_assistant_is_continued() -> None:
    engine = FakeEngine("Hello")
    body = post(engine, MESSAGES, message(messages=[*HI, {"role": "assistant", "content": "Well, "}])).json()
    assert prompt_of(engine) == "<s>user:hi\n<s>assistant:Well, "
    assert body["content"][0]["text"] == "Hello"


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, True),
        ({"type": "enabled", "budget_tokens": 50}, True),
    ],
)
def test_thinking_is_switched_through_the_template(thinking: Any, thinks: bool) -> None:
    engine = FakeEngine(template=TOOLS)
    assert post(engine, MESSAGES, message(thinking=thinking)).status_code == 200
    assert ("<think>" in prompt_of(engine)) == thinks


def test_effort_and_thoughts_reach_templates_that_read_them() -> None:
    template = (
        "{{ reasoning_effort }}|{% for m in messages %}{{ m['reasoning_content'] }}|{{ m['content'] }}|{% endfor %}"
    )
    engine = FakeEngine(template=template)
    thought = {"type": "thinking", "thinking": "Hmm", "signature": ""}
    turns = [*HI, {"role": "assistant", "content": [thought, {"type": "text", "text": "ok"}]}, *HI]
    assert post(engine, MESSAGES, message(messages=turns, output_config={"effort": "low"})).status_code == 200
    assert prompt_of(engine) == "low||hi|Hmm|ok||hi|"


def test_fields_reach_the_engine() -> None:
    engine = FakeEngine(policy="priority")
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["X"], "seed": 3, "min_p": 0.1}
    more = {"metadata": {"user_id": "me"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}
    answer = post(engine, MESSAGES, message(**fields, **more, priority=4, cache_salt="s", novelty=1), policy="priority")
    assert answer.headers["x-jackfield-ignored"] == "novelty"
    params = engine.params[0]
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.5, 0.9, 5, ["X"])
    assert (params.seed, params.min_p, params.max_tokens) == (3, 0.1, 50)
    assert (engine.priorities, engine.salts) == ([4], ["s"])


def test_an_error_in_mid_stream_is_the_last_event() -> None:
    engine = FakeEngine("Hello", fail_after=2, error=EngineDeadError("the engine process ended"))
    *blocks, last, rest = post(engine, MESSAGES, message(stream=True)).text.split("\n\n")
    assert rest == "" and len(blocks) == 5 and "message_stop" not in "".join(blocks)
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "error": {"type": "api_error", "message": "the engine process ended"},
    }
    assert not engine.living


@pytest.mark.parametrize("kind", [Connection, Hasty])
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
def test_u245_a_client_that_leaves_frees_everything(kind: type[Connection], path: str, stream: bool) -> None:
    async def test() -> None:
        engine = FakeEngine("ab", forever=True, max_model_len=10_000_000)
        body = message(max_tokens=1_000_000) if path == MESSAGES else {"input": "hi"}
        connection = kind(engine, path, {**body, "stream": stream, "ignore_eos": True})
        task = asyncio.create_task(connection.run())
        await until(lambda: bool(engine.prompts) and (kind is Hasty or not stream or len(connection.sent) > 3))
        if not (kind is Hasty and stream):
            connection.left.set()
        await task
        await until(lambda: not engine.living)

    run(test)
