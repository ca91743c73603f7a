"""Responses are kept, found again, continued, cancelled, deleted, and let go of when room is short."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from api_calls import RESPONSES, named_events, run
from fake_engine import FakeEngine, client, make_app
from test_server_disconnect import Connection, until

ENDLESS: dict[str, Any] = {"forever": True, "max_model_len": 10_000_000}
BACKGROUND = {"input": "hi", "background": True, "ignore_eos": True}


async def create(http: httpx2.AsyncClient, text: str = "hi", **fields: Any) -> dict[str, Any]:
    response = await http.post(RESPONSES, json={"input": text, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def status(http: httpx2.AsyncClient, response_id: str) -> str:
    found = await http.get(f"{RESPONSES}/{response_id}")
    text: str = found.json().get("status", str(found.status_code))
    return text


async def finished(http: httpx2.AsyncClient, response_id: str) -> dict[str, Any]:
    while await status(http, response_id) in ("queued", "in_progress"):
        await asyncio.sleep(0.001)
    body: dict[str, Any] = (await http.get(f"{RESPONSES}/{response_id}")).json()
    return body


def error_of(response: httpx2.Response) -> tuple[int, str | None, str]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


def test_responses_are_found_and_deleted() -> None:
    async def test() -> None:
        async with client(FakeEngine()) as http:
            body = await create(http)
            url = f"{RESPONSES}/{body['id']}"
            assert (await http.get(url)).json() == body
            gone = await http.delete(url)
            assert gone.json() == {"id": body["id"], "object": "response", "deleted": True}
            for found in (await http.get(url), await http.delete(url), await http.post(f"{url}/cancel")):
                assert error_of(found)[0] == 404 and "or it is no longer kept" in error_of(found)[2]
            hidden = await create(http, store=False)
            assert (hidden["store"], await status(http, hidden["id"])) == (False, "404")

    run(test)


def test_a_conversation_goes_on() -> None:
    async def test() -> None:
        engine = FakeEngine("Yes")
        async with client(engine) as http:
            first = await create(http, "one", instructions="Be good.")
            second = await create(http, "two", previous_response_id=first["id"])
            items = [{"role": "user", "content": "three"}, {"role": "user", "content": "four"}]
            third = await http.post(RESPONSES, json={"input": items, "previous_response_id": second["id"]})
            assert third.json()["previous_response_id"] == second["id"]
            lost = await http.post(RESPONSES, json={"input": "x", "previous_response_id": "resp_none"})
            assert error_of(lost)[0] == 404
        texts = ["".join("<s>" if i == 257 else chr(i) for i in prompt) for prompt in engine.prompts]
        turns = "<s>user:one\n<s>assistant:Yes\n<s>user:two\n"
        assert texts[0] == "<s>system:Be good.\n<s>user:one\n<s>assistant:"
        assert texts[1] == f"{turns}<s>assistant:"
        assert texts[2] == f"{turns}<s>assistant:Yes\n<s>user:three\n<s>user:four\n<s>assistant:"

    run(test)


def test_input_items_come_in_pages() -> None:
    async def test() -> None:
        async with client(FakeEngine()) as http:
            items = [{"role": "user", "content": str(number), "id": f"m{number}"} for number in range(5)]
            made = await http.post(RESPONSES, json={"input": items})
            url = f"{RESPONSES}/{made.json()['id']}/input_items"
            page = (await http.get(url, params={"limit": 2})).json()
            assert [item["id"] for item in page["data"]] == ["m4", "m3"] and page["has_more"]
            assert page["data"][0]["content"] == [{"type": "input_text", "text": "4"}]
            page = (await http.get(url, params={"after": "m3", "limit": 3})).json()
            assert [item["id"] for item in page["data"]] == ["m2", "m1", "m0"] and not page["has_more"]
            page = (await http.get(url, params={"order": "asc"})).json()
            assert (page["first_id"], page["last_id"]) == ("m0", "m4")
            assert error_of(await http.get(url, params={"after": "x"}))[:2] == (400, "after")
            assert error_of(await http.get(url, params={"limit": 101}))[:2] == (400, "limit")

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_the_background_is_queued_polled_and_replayed(stream: bool) -> None:
    async def test() -> None:
        engine = FakeEngine("Hey")
        async with client(engine) as http:
            sent = await http.post(RESPONSES, json={"input": "hi", "background": True, "stream": stream})
            events = named_events(sent) if stream else []
            body = events[0]["response"] if stream else sent.json()
            assert (body["status"], body["output"], body["background"]) == ("queued", [], True)
            done = await finished(http, body["id"])
            assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", "Hey")
            url = f"{RESPONSES}/{body['id']}"
            replayed = named_events(await http.get(url, params={"stream": True}))
            assert [event["type"] for event in replayed][:4] == [
                *("response.created", "response.queued", "response.in_progress", "response.output_item.added")
            ]
            assert [event["sequence_number"] for event in replayed] == list(range(12))
            assert not stream or replayed == events
            assert replayed[-1]["response"] == done
            rest = named_events(await http.get(url, params={"stream": True, "starting_after": 7}))
            assert rest == replayed[8:]
            assert error_of(await http.get(url, params={"starting_after": 1}))[:2] == (400, "starting_after")
            whole = await create(http)
            answer = await http.get(f"{RESPONSES}/{whole['id']}", params={"stream": True})
            assert error_of(answer)[2].startswith("this response was made as a whole and has no events")

    run(test)


def test_u249_a_cancelled_response_frees_the_engine_and_stays_cancelled() -> None:
    async def test() -> None:
        engine = FakeEngine("ab", **ENDLESS)
        async with client(engine) as http:
            body = (await http.post(RESPONSES, json=BACKGROUND)).json()
            url = f"{RESPONSES}/{body['id']}"
            await until(lambda: bool(engine.living))
            while await status(http, body["id"]) != "in_progress":
                await asyncio.sleep(0.001)
            for _ in range(2):
                cancelled = (await http.post(f"{url}/cancel")).json()
                assert (cancelled["status"], engine.living) == ("cancelled", set())
            text = cancelled["output"][0]["content"][0]["text"]
            assert text and (await http.get(url)).json() == cancelled
            done = await create(http, max_output_tokens=3)
            refused = await http.post(f"{RESPONSES}/{done['id']}/cancel")
            assert error_of(refused)[2].startswith("only responses in the background can be cancelled")
            short = await http.post(RESPONSES, json={**BACKGROUND, "max_output_tokens": 2})
            over = await finished(http, short.json()["id"])
            after = await http.post(f"{RESPONSES}/{over['id']}/cancel")
            assert (after.status_code, after.json()) == (200, over)

    run(test)


def test_a_deleted_or_unfinished_response() -> None:
    async def test() -> None:
        engine = FakeEngine("ab", **ENDLESS)
        async with client(engine) as http:
            body = (await http.post(RESPONSES, json=BACKGROUND)).json()
            early = await http.post(RESPONSES, json={"input": "x", "previous_response_id": body["id"]})
            assert error_of(early)[1] == "previous_response_id" and "cannot be continued" in error_of(early)[2]
            await http.delete(f"{RESPONSES}/{body['id']}")
            assert engine.living == set() and await status(http, body["id"]) == "404"

    run(test)


def test_a_failure_in_the_background_is_told() -> None:
    async def test() -> None:
        async with client(FakeEngine("Hello", fail_after=3, steps=(1,))) as http:
            body = await create(http, background=True)
            done = await finished(http, body["id"])
            assert (done["status"], done["error"]) == (
                "failed",
                {"code": "server_error", "message": "the engine broke"},
            )

    run(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("background", [False, True])
def test_u245_only_the_background_goes_on_without_its_client(stream: bool, background: bool) -> None:
    async def test() -> None:
        engine = FakeEngine("ab", **ENDLESS)
        body = {"input": "hi", "ignore_eos": True, "stream": stream, "background": background}
        connection = Connection(engine, RESPONSES, body)
        task = asyncio.create_task(connection.run())
        await until(lambda: bool(engine.living) and (not stream or len(connection.sent) > 3))
        connection.left.set()
        await task
        if background:
            await asyncio.sleep(0.01)
            assert engine.living
            [record] = connection.app.state.responses._records.values()
            await record.cancel()
        await until(lambda: not engine.living)

    run(test)


async def some(http: httpx2.AsyncClient, count: int) -> AsyncIterator[str]:
    for _ in range(count):
        yield (await create(http))["id"]


def test_old_responses_make_room_for_new_ones() -> None:
    async def test() -> None:
        app = make_app(FakeEngine(), response_store_bytes="8KB")
        store = app.state.responses
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test") as http:
            first, second = [one async for one in some(http, 2)]
            assert len(store) == 2 and 1000 < store.size < 8000
            await status(http, first)  # used last, so the second is the older one now
            for _ in range(10):
                await create(http)
                await status(http, first)
                assert store.size <= 8000
            assert (await status(http, first), await status(http, second)) == ("completed", "404")
            large = await create(http, "x" * 200, metadata={"note": "y" * 9000})
            assert (await status(http, large["id"]), await status(http, first)) == ("404", "completed")
            for one in list(store._records.values()):
                store.remove(one)
            assert store.size == 0

    run(test)


def test_a_running_response_keeps_what_somebody_reads() -> None:
    async def test() -> None:
        engine = FakeEngine("ab", **ENDLESS)
        app = make_app(engine, response_store_bytes="6KB")
        store = app.state.responses
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test") as http:
            body = (await http.post(RESPONSES, json=BACKGROUND)).json()
            record = store.get(body["id"])
            reader = record.follow()
            await until(lambda: store.size > 8000)
            assert len(record.read(0)) > 20, "a reader has not read them yet"
            full = await http.post(RESPONSES, json=BACKGROUND)
            assert (full.status_code, full.json()["error"]["code"]) == (503, "queue_full")
            reader.close()
            await until(lambda: store.size <= 6200)
            lost = await http.get(f"{RESPONSES}/{body['id']}", params={"stream": True})
            assert error_of(lost)[1] == "starting_after" and "no longer kept" in error_of(lost)[2]
            await record.cancel()
            assert record.size == store.size or len(store) == 0

    run(test)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"response_store_bytes": 0}, "this server keeps no responses"),
        ({"api_processes": 2}, "this server keeps no responses: it has 2 API processes, which share none"),
    ],
)
def test_without_a_store_what_needs_it_is_refused(settings: dict[str, Any], why: str) -> None:
    async def test() -> None:
        async with client(FakeEngine(), **settings) as http:
            body = await create(http)
            assert body["store"] is False
            for field in ("store", "background"):
                found = error_of(await http.post(RESPONSES, json={"input": "x", field: True}))
                assert found == (400, field, f"{why}; leave {field} out")
            url = f"{RESPONSES}/{body['id']}"
            asked = [
                await http.get(url),
                await http.post(f"{url}/cancel"),
                await http.delete(url),
                await http.get(f"{url}/input_items"),
                await http.post(RESPONSES, json={"input": "x", "previous_response_id": body["id"]}),
            ]
            assert {error_of(found)[0] for found in asked} == {404}
            assert all(error_of(found)[2].startswith(why) for found in asked)

    run(test)
