"""Anthropic's official client drives a real server with a real model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from idle_server import idle
from served import Served

pytestmark = pytest.mark.model

COLORS: list[Any] = [{"role": "user", "content": "Name three colors."}]
FIELDS: dict[str, Any] = {"model": "smol", "messages": COLORS, "max_tokens": 24, "extra_body": {"temperature": 0}}


def whole(client: Anthropic, **fields: Any) -> anthropic.types.Message:
    message: anthropic.types.Message = client.messages.create(**{**FIELDS, **fields})
    return message


def streamed(client: Anthropic, **fields: Any) -> tuple[anthropic.types.Message, list[str]]:
    """Return what the client makes of a stream, and the types of its events."""
    with client.messages.stream(**{**FIELDS, **fields}) as stream:
        kinds: list[str] = [event.type for event in stream]
        return stream.get_final_message(), kinds


def text_of(message: anthropic.types.Message) -> str:
    [block] = message.content
    assert block.type == "text"
    return block.text


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"extra_body": {"temperature": 1, "top_p": 0.9, "top_k": 40, "seed": 5}}, None),
        ({"max_tokens": 3}, "max_tokens"),
        ({"system": "Answer in one word.", "stop_sequences": ["\n", "."]}, None),
        ({"messages": [*COLORS, {"role": "assistant", "content": "The three colors are"}]}, None),
    ],
    ids=["plain", "seeded", "short", "stops", "prefill"],
)
def test_p1_a_stream_adds_up_to_the_whole_answer(claude: Anthropic, fields: dict[str, Any], reason: str | None) -> None:
    whole(claude, **fields)  # from now on the prefix cache has the same of it
    message = whole(claude, **fields)
    same, kinds = streamed(claude, **fields)
    assert text_of(same) == text_of(message) != ""
    assert (same.stop_reason, same.stop_sequence) == (message.stop_reason, message.stop_sequence)
    assert reason in (None, message.stop_reason)
    assert same.usage == message.usage and message.usage.output_tokens > 0
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_j158_the_stop_sequence_that_was_hit_is_told(claude: Anthropic) -> None:
    text = text_of(whole(claude))
    stop = text.split()[2]
    message = whole(claude, stop_sequences=["@@", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == text[: text.index(stop)]


def test_j160_the_raw_events_have_usage_and_all_fields(claude: Anthropic) -> None:
    events = list(claude.messages.create(**FIELDS, stream=True))
    start, delta = events[0], events[-2]
    assert start.type == "message_start" and delta.type == "message_delta"
    assert start.message.usage.input_tokens + (start.message.usage.cache_read_input_tokens or 0) > 10
    assert delta.usage.output_tokens > 0 and "stop_sequence" in delta.delta.model_fields_set


def test_tokens_are_counted_as_they_are_used(claude: Anthropic) -> None:
    for fields in ({"messages": COLORS}, {"messages": COLORS, "system": [{"type": "text", "text": "Be good."}]}):
        counted = claude.messages.count_tokens(model="smol", **fields)  # type: ignore[arg-type]
        usage = whole(claude, **fields).usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_the_asynchronous_client(writer: Served) -> None:
    async def ask() -> tuple[str, str, int]:
        async with AsyncAnthropic(base_url=writer.url, auth_token="none", api_key=None, max_retries=0) as client:
            message = await client.messages.create(**FIELDS)
            async with client.messages.stream(**FIELDS) as stream:
                pieces = [text async for text in stream.text_stream]
            counted = await client.messages.count_tokens(model="smol", messages=COLORS)
            return text_of(message), "".join(pieces), counted.input_tokens

    one, other, count = asyncio.run(ask())
    assert one == other != "" and count > 10


def test_errors_are_the_clients_own(claude: Anthropic) -> None:
    cases: list[tuple[type[anthropic.APIStatusError], str, Callable[[], Any]]] = [
        (anthropic.NotFoundError, "not_found_error", lambda: whole(claude, model="claude")),
        (anthropic.BadRequestError, "invalid_request_error", lambda: whole(claude, extra_body={"temperature": 2})),
        (anthropic.BadRequestError, "invalid_request_error", lambda: streamed(claude, max_tokens=0)),
        (
            anthropic.BadRequestError,
            "invalid_request_error",
            lambda: whole(claude, tools=[{"name": "f", "input_schema": {"type": "object"}}]),
        ),
    ]
    for kind, name, call in cases:
        with pytest.raises(kind) as caught:
            call()
        body: Any = caught.value.body
        assert (body["type"], body["error"]["type"]) == ("error", name)
        assert body["request_id"] == caught.value.request_id != ""


def test_u245_closing_a_stream_frees_the_engine(claude: Anthropic, writer: Served) -> None:
    with claude.messages.create(
        **{**FIELDS, "max_tokens": 900, "extra_body": {"ignore_eos": True}}, stream=True
    ) as stream:
        for _ in range(6):
            next(stream)
    assert idle(writer.url)
