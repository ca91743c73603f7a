"""Conversations become prompts: content parts, templates, continued messages, and templates that misbehave."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_engine import START, TEMPLATE, FakeEngine, make_app, post, say

from jackfield.server import chat as chat_module
from jackfield.server.bounded import StoppedError, run_bounded

CHAT = "/v1/chat/completions"
TOOLS_TEMPLATE = (
    "{% if tools %}T{{ tools[0].function.name }}{% endif %}{% for d in documents or [] %}D{{ d.text }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}={{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
    "{% if reasoning_effort %}R{{ reasoning_effort }}{% endif %}{% if add_generation_prompt %}>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def prompt(body: dict[str, Any], template: str | None = TEMPLATE, **settings: Any) -> str:
    """Return the text that the engine got for a request."""
    engine = FakeEngine(template=template, max_model_len=2048)
    response = post(engine, CHAT, body, **settings)
    assert response.status_code == 200, response.text
    return bytes(byte for byte in engine.prompts[0] if byte < 256).decode()


def refused(body: dict[str, Any], template: str | None = TEMPLATE, **settings: Any) -> tuple[str | None, str]:
    response = post(FakeEngine(template=template), CHAT, body, **settings)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def test_i146_text_parts_are_joined_in_order() -> None:
    parts = [{"type": "text", "text": "one"}, "two", {"type": "input_text", "text": "three"}]
    assert prompt({"messages": [{"role": "user", "content": parts}]}) == "user:one\ntwo\nthree\nassistant:"


@pytest.mark.parametrize(
    ("part", "param", "message"),
    [
        (
            {"type": "image_url", "image_url": {"url": "data:"}},
            "messages.0.content.1",
            "the model takes text only, and this content part is of type 'image_url'; "
            "leave it out, or ask a model that takes it",
        ),
        ({"type": "txt"}, "messages.0.content.1.type", "a content part needs a known type; did you mean 'text'?"),
        ({"type": "text"}, "messages.0.content.1.text", "a text part holds a text; send a string"),
        (5, "messages.0.content.1.type", "a content part needs a known type; send {'type': 'text', 'text': ...}"),
    ],
)
def test_parts_that_are_no_text_are_named(part: Any, param: str, message: str) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}
    assert refused(body) == (param, message)


def test_developers_are_systems_unless_the_template_knows_them() -> None:
    body = {"messages": [{"role": "developer", "content": "x"}]}
    assert prompt(body) == "system:x\nassistant:"
    assert prompt(body, TEMPLATE + "{# developer #}") == "developer:x\nassistant:"


def test_i148_the_templates_own_message_reaches_the_client() -> None:
    template = TEMPLATE + "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    param, message = refused({"messages": [{"role": "system", "content": "x"}]}, template)
    assert param == "messages" and "no system role here" in message


@pytest.mark.parametrize("content", ["OK!\n", "OK!  ", "OK!"])
def test_i150_a_continued_message_keeps_its_end(content: str) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}{{ add_generation_prompt }}"
    messages = [{"role": "user", "content": "joke"}, {"role": "assistant", "content": content}]
    body = {"messages": messages, "continue_final_message": True}
    assert prompt({**body, "add_generation_prompt": False}, template) == f"[user]joke</s>[assistant]{content}"
    assert prompt(body, template) == f"[user]joke</s>[assistant]{content}"
    assert refused({**body, "add_generation_prompt": True}, template) == (
        "continue_final_message",
        "a prompt cannot both continue the last message and begin the next one; set add_generation_prompt to false",
    )


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    param, message = refused(say(continue_final_message=True), "{% for m in messages %}{{ m.role }}{% endfor %}")
    assert param == "continue_final_message" and message.startswith("the chat template does not write the last message")


def test_i152_no_head_of_the_assistant_without_a_generation_prompt() -> None:
    body = say("x", add_generation_prompt=False, echo=True)
    assert prompt(body) == "user:x\n"
    engine = FakeEngine("Hello")
    assert post(engine, CHAT, body).json()["choices"][0]["message"]["content"] == "xHello"
    assert post(engine, CHAT, say("x", echo=True)).json()["choices"][0]["message"]["content"] == "Hello"


def test_i154_a_template_without_a_generation_prompt_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jackfield.server"):
        make_app(FakeEngine())
        assert caplog.messages == []
        make_app(FakeEngine(template="{{ messages[0].content }}"))
    assert caplog.messages == [
        "the chat template does not read add_generation_prompt: the model may answer as the user"
    ]


def test_tools_documents_and_effort_reach_the_template() -> None:
    body = say("x", tools=[TOOL], documents=[{"text": "doc"}], reasoning_effort="low")
    assert prompt(body, TOOLS_TEMPLATE) == "TlookDdocuser=x;Rlow>"
    for choice in ("none", "auto"):
        assert prompt(say("x", tools=[TOOL], tool_choice=choice), TOOLS_TEMPLATE) == "Tlookuser=x;>"
    assert prompt(say("x", chat_template_kwargs={"reasoning_effort": "high"}), TOOLS_TEMPLATE) == "user=x;Rhigh>"


def test_tool_calls_are_objects_in_the_template() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "seen"},
    ]
    assert prompt({"messages": messages}, TOOLS_TEMPLATE) == 'user=x;assistant=!{"a": 1};tool=seen;>'
    call["function"] = {"name": "look", "arguments": "no json"}
    assert refused({"messages": messages}, TOOLS_TEMPLATE)[0] == "messages.1.tool_calls.0.function.arguments"


def test_b26_what_the_template_does_not_read_is_refused() -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "stream": True, "logprobs": True, "top_logprobs": 2}
    assert refused(say(**fields)) == ("tools", "the model's chat template takes no tools; leave tools out")
    assert refused(say(documents=[{}]))[0] == "documents"
    assert refused(say(reasoning_effort="low"))[0] == "reasoning_effort"
    assert refused(say(chat_template_kwargs={"add_generation_promt": 1})) == (
        "chat_template_kwargs.add_generation_promt",
        "the chat template does not read this variable; did you mean 'add_generation_prompt'?",
    )
    for name in ("messages", "tools", "tokenize", "chat_template", "return_dict"):
        assert refused(say(chat_template_kwargs={name: 1}))[0] == f"chat_template_kwargs.{name}"


def test_templates_of_requests_need_the_servers_trust() -> None:
    body = say("x", chat_template="<{{ messages[0].content }}>")
    assert refused(body) == (
        "chat_template",
        "this server does not take chat templates from requests; "
        "leave it out, or start the server with --trust-request-chat-template",
    )
    trusting: dict[str, Any] = {"trust_request_chat_template": True}
    assert prompt(body, **trusting) == "<x>"
    assert refused(say(chat_template="{% if %}"), **trusting)[0] == "messages"
    assert refused(say(chat_template="x" * 70_000), **trusting) == (
        "chat_template",
        "a chat template has at most 65536 characters",
    )
    assert refused(say(chat_template="{{ ''.__class__.__mro__ }}{{ [].__init__() }}"), **trusting)[0] == "messages"


def test_a_template_of_the_operator(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("own {{ messages[0].content }}")
    assert prompt(say("x"), chat_template=str(path)) == "own x"
    assert prompt(say("x"), template=None, chat_template=str(path)) == "own x"
    assert refused(say("x"), template=None) == (
        "chat_template",
        "the model has no chat template; give one with the request, or send a plain prompt",
    )


def test_a_template_without_an_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "RENDER_SECONDS", 0.3)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    param, message = refused(say(chat_template=loop), trust_request_chat_template=True)
    assert param == "messages" and message.startswith("the chat template did not end within 0.3 s")
    until = time.monotonic() + 5
    while any(thread.name == "jackfield-bounded" for thread in threading.enumerate()):
        assert time.monotonic() < until, "the thread goes on"
        time.sleep(0.02)


def test_bounded_work_that_is_given_up_ends() -> None:
    ended: list[type[BaseException]] = []

    def work() -> None:
        try:
            while True:
                time.sleep(0.001)
        except BaseException as error:
            ended.append(type(error))
            raise

    async def give_up() -> None:
        task = asyncio.create_task(run_bounded(work, 30))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while not ended:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(give_up(), 10))
    assert ended == [StoppedError]


def test_nested_beyond_all_measure() -> None:
    text = '{"messages":[{"role":"user","content":"x","a":' + "[" * 800 + "]" * 800 + "}]}"
    assert post(FakeEngine(), CHAT, text.encode()).status_code in (200, 400)


def test_special_tokens_of_chat_come_from_the_template() -> None:
    engine = FakeEngine()
    post(engine, CHAT, say("x"))
    assert engine.prompts[0].count(START) == 2


def test_tokenize_reads_a_conversation_as_chat_does() -> None:
    engine = FakeEngine()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    fields = {"messages": messages, "continue_final_message": True}
    post(engine, CHAT, fields)
    assert post(engine, "/tokenize", fields).json()["tokens"] == engine.prompts[0]
    both = post(engine, "/tokenize", {"prompt": "a", "messages": fields["messages"]})
    assert both.json()["error"]["message"].startswith("give either a prompt or messages")
    mixed = post(engine, "/tokenize", {"prompt": "a", "add_generation_prompt": True})
    assert mixed.json()["error"]["param"] == "add_generation_prompt"
    assert json.loads(post(engine, "/detokenize", {"tokens": [9999]}).text)["error"]["param"] == "tokens"
