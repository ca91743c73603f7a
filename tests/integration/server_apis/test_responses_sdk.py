"""OpenAI's official client drives the Responses API of a real server with a real model."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest
from idle_server import idle
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import Response
from served import Served

pytestmark = pytest.mark.model

FIELDS: dict[str, Any] = {"model": "smol", "input": "Name three colors.", "temperature": 0, "max_output_tokens": 24}
LONG: dict[str, Any] = {**FIELDS, "max_output_tokens": 900, "extra_body": {"ignore_eos": True}}


def whole(client: OpenAI, **fields: Any) -> Response:
    response: Response = client.responses.create(**{**FIELDS, **fields})
    return response


def polled(client: OpenAI, response: Response) -> Response:
    """Return a response of the background once it is over."""
    until = time.monotonic() + 30
    while response.status in ("queued", "in_progress") and time.monotonic() < until:
        time.sleep(0.05)
        response = client.responses.retrieve(response.id)
    return response


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, None),
        ({"temperature": 1, "extra_body": {"seed": 5}}, None),
        ({"max_output_tokens": 3}, "incomplete"),
        ({"instructions": "Answer in one word.", "extra_body": {"stop": ["."]}}, None),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, None),
    ],
    ids=["plain", "seeded", "short", "instructed", "logprobs"],
)
def test_p1_a_stream_adds_up_to_the_whole_response(writing: OpenAI, fields: dict[str, Any], status: str | None) -> None:
    # From here on the prompt is cached: computed as a whole, its numbers differ in the last digits.
    whole(writing, **fields)
    response = whole(writing, **fields)
    assert status in (None, response.status) and response.output_text
    events = list(writing.responses.create(**{**FIELDS, **fields}, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == response.output_text == last.response.output_text
    items: list[Any] = [response.output[0], last.response.output[0]]
    parts = [item.content[0] for item in items]
    assert parts[0] == parts[1]
    assert [one.token for event in deltas for one in event.logprobs] == [one.token for one in parts[0].logprobs or ()]
    usage, same = response.usage, last.response.usage
    assert usage is not None and same is not None
    assert (usage.input_tokens, usage.output_tokens) == (same.input_tokens, same.output_tokens)


def test_the_clients_own_reader_of_streams(writing: OpenAI) -> None:
    with writing.responses.stream(**{**FIELDS, "max_output_tokens": 100}) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == text == whole(writing, max_output_tokens=100).output_text


def test_a_response_is_the_answer_of_chat(writing: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": FIELDS["input"]}]
    chat = writing.chat.completions.create(model="smol", messages=messages, temperature=0, max_tokens=24)
    assert whole(writing).output_text == chat.choices[0].message.content


def test_a_conversation_goes_on_by_ids(writing: OpenAI) -> None:
    first = whole(writing)
    second = whole(writing, input="And two more?", previous_response_id=first.id)
    turns: Any = [
        {"role": "user", "content": FIELDS["input"]},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And two more?"},
    ]
    chat = writing.chat.completions.create(model="smol", messages=turns, temperature=0, max_tokens=24)
    assert second.output_text == chat.choices[0].message.content
    assert second.usage is not None and second.usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]
    assert whole(writing, input=turns).output_text == second.output_text
    items: list[Any] = list(writing.responses.input_items.list(second.id))
    assert [item.content[0].text for item in items] == ["And two more?"]


def test_retrieve_delete_and_what_is_not_there(writing: OpenAI) -> None:
    response = whole(writing)
    assert writing.responses.retrieve(response.id) == response
    writing.responses.delete(response.id)
    hidden = whole(writing, store=False)
    for response_id in (response.id, hidden.id, "resp_none"):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            writing.responses.retrieve(response_id)
    with pytest.raises(openai.NotFoundError):
        whole(writing, previous_response_id=response.id)
    with pytest.raises(openai.BadRequestError) as caught:
        whole(writing, text={"format": {"type": "json_object"}})
    assert caught.value.param == "text.format"


def test_the_background(writing: OpenAI, writer: Served) -> None:
    expected = whole(writing)
    response = whole(writing, background=True)
    assert (response.status, response.output) == ("queued", [])
    done = polled(writing, response)
    assert done.output_text == expected.output_text and done.status == expected.status
    events = list(writing.responses.retrieve(response.id, stream=True))
    rest = list(writing.responses.retrieve(response.id, stream=True, starting_after=5))
    assert rest == events[6:] and events[-1].response == done  # type: ignore[union-attr]


def test_a_client_of_the_background_leaves_and_comes_back(writing: OpenAI, writer: Served) -> None:
    with writing.responses.create(**{**FIELDS, "max_output_tokens": 60}, background=True, stream=True) as stream:
        seen = [next(stream) for _ in range(8)]
    first: Any = seen[0]
    more = list(writing.responses.retrieve(first.response.id, stream=True, starting_after=seen[-1].sequence_number))
    deltas = [event.delta for event in (*seen, *more) if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole(writing, max_output_tokens=60).output_text


def test_u249_cancelling_frees_the_engine(writing: OpenAI, writer: Served) -> None:
    response = writing.responses.create(**LONG, background=True)
    for _ in range(2):
        assert writing.responses.cancel(response.id).status == "cancelled"
    assert idle(writer.url)
    with pytest.raises(openai.NotFoundError):
        writing.responses.cancel("resp_none")


def test_u245_closing_a_stream_frees_the_engine(writing: OpenAI, writer: Served) -> None:
    with writing.responses.create(**LONG, stream=True) as stream:
        for _ in range(6):
            next(stream)
    assert idle(writer.url)


def test_the_asynchronous_client(writer: Served) -> None:
    async def ask() -> tuple[str, str]:
        async with AsyncOpenAI(base_url=f"{writer.url}/v1", api_key="none", max_retries=0) as client:
            response = await client.responses.create(**FIELDS)
            stream = await client.responses.create(**FIELDS, stream=True)
            pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            return response.output_text, "".join(pieces)

    one, other = asyncio.run(ask())
    assert one == other != ""
