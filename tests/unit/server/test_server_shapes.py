"""Answers and streams have the shapes of OpenAI's API, in the right order."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from fake_engine import END, START, FakeEngine, get, make_app, post, say

from jackfield.server.openai.answers import ChatCompletion, Completion

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def events(response: httpx2.Response) -> list[dict[str, Any]]:
    """Return the chunks of a complete stream."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def test_a_chat_answer_has_the_documented_form() -> None:
    body = post(FakeEngine("Hello"), CHAT, say()).json()
    ChatCompletion.model_validate(body, strict=True)
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt = len("user:hi\n") + len("assistant:") + 2
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert body["model"] == "fake/model" and body["id"].startswith("chatcmpl-")


def test_everything_at_once_has_the_documented_form() -> None:
    fields: dict[str, Any] = {
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        "prompt_logprobs": 1,
        "n": 2,
    }
    ChatCompletion.model_validate(post(FakeEngine(), CHAT, say(**fields)).json(), strict=True)
    fields = {"prompt": ["ab", "cd"], "logprobs": 2, "echo": True, "return_token_ids": True, "prompt_logprobs": 1}
    body = post(FakeEngine(), TEXT, {**fields, "n": 2}).json()
    Completion.model_validate(body, strict=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == ["abHello", "abHello", "cdHello", "cdHello"]


def test_a_chat_stream_is_role_deltas_end_usage_done() -> None:
    found = events(post(FakeEngine("Hey"), CHAT, say(stream=True, stream_options={"include_usage": True})))
    deltas = [(chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"]) for chunk in found[:-1]]
    assert deltas == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "H"}, None),
        ({"content": "e"}, None),
        ({"content": "y"}, None),
        ({}, "stop"),
    ]
    assert [chunk["usage"] for chunk in found[:-1]] == [None] * 5
    assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] == 4
    assert {(chunk["id"], chunk["object"]) for chunk in found} == {(found[0]["id"], "chat.completion.chunk")}


def test_a29_usage_is_sent_when_it_was_asked_for_only() -> None:
    for options in ({}, {"include_usage": False}, None):
        found = events(post(FakeEngine(), CHAT, say(stream=True, stream_options=options)))
        assert [chunk for chunk in found if "usage" in chunk or not chunk["choices"]] == []


def test_continuous_usage_grows_with_every_chunk() -> None:
    options = {"continuous_usage_stats": True}
    found = events(post(FakeEngine("abc"), CHAT, say(stream=True, stream_options=options)))
    assert [chunk["usage"]["completion_tokens"] for chunk in found] == [0, 1, 2, 3, 4]


def test_choices_of_a_stream_are_interleaved() -> None:
    found = events(post(FakeEngine("ab"), CHAT, say(stream=True, n=2)))
    assert [chunk["choices"][0]["index"] for chunk in found] == [0, 1, 0, 1, 0, 1, 0, 1]


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, say()),
    (CHAT, say(logprobs=True, top_logprobs=2, n=2)),
    (CHAT, say(stop=["lo w"], include_stop_str_in_output=True)),
    (CHAT, say(stop=["lo w"])),
    (CHAT, say(stop=["never"], max_tokens=4)),
    (CHAT, say(return_token_ids=True, logprobs=True)),
    (CHAT, say(echo=True, add_generation_prompt=False)),
    (CHAT, say(echo=True, add_generation_prompt=False, max_tokens=0, logprobs=True)),
    (TEXT, {"prompt": "ab", "max_tokens": 40}),
    (TEXT, {"prompt": ["ab", "cd"], "max_tokens": 40}),
    (TEXT, {"prompt": [[97], [98]], "echo": True, "logprobs": 2, "n": 2}),
    (TEXT, {"prompt": "äb", "echo": True, "logprobs": 0, "max_tokens": 40, "return_token_ids": True}),
    (TEXT, {"prompt": "ab", "echo": True, "logprobs": 3, "max_tokens": 0}),
    (TEXT, {"prompt": "ab", "logprobs": 1, "return_tokens_as_token_ids": True}),
    (TEXT, {"prompt": "ab", "skip_special_tokens": False, "logprobs": 1, "max_tokens": 40}),
]


def merged(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the choices that the chunks of a stream add up to."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        whole = found.setdefault(choice["index"], {"text": "", "logprobs": {}, "token_ids": []})
        whole["text"] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        whole["token_ids"] += choice.get("token_ids", [])
        for key, part in (choice["logprobs"] or {}).items():
            if part:
                whole["logprobs"].setdefault(key, []).extend(part)
        whole["end"] = (choice["finish_reason"], choice.get("stop_reason"))
    return found


def wholes(body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the choices of an answer in the form of :func:`merged`."""
    return {
        choice["index"]: {
            "text": choice["message"]["content"] if "message" in choice else choice["text"],
            "token_ids": choice.get("token_ids", []),
            "logprobs": {key: part for key, part in (choice["logprobs"] or {}).items() if part},
            "end": (choice["finish_reason"], choice["stop_reason"]),
        }
        for choice in body["choices"]
    }


@pytest.mark.parametrize("steps", [(1,), (2, 1, 3), (100,)])
@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_p1_a_stream_adds_up_to_the_answer(path: str, body: dict[str, Any], steps: tuple[int, ...]) -> None:
    words = "Hello wörld 日本 😀."
    engine = FakeEngine(words, steps=steps)
    whole = post(engine, path, {"seed": 1, **body}).json()
    chunks = events(post(engine, path, {"seed": 1, **body, "stream": True}))
    assert merged(chunks) == wholes(whole)
    assert {choice["finish_reason"] for choice in whole["choices"]} <= {"stop", "length"}


def test_a3_a_stop_text_is_in_neither_form() -> None:
    for body in (say(stop="lo w"), {"prompt": "x", "stop": ["lo w"]}):
        path = CHAT if "messages" in body else TEXT
        whole = post(FakeEngine("Hello world"), path, body).json()
        chunks = events(post(FakeEngine("Hello world"), path, {**body, "stream": True}))
        assert merged(chunks)[0] == wholes(whole)[0]
        assert (merged(chunks)[0]["text"], merged(chunks)[0]["end"]) == ("Hel", ("stop", "lo w"))


def test_log_probabilities_of_chat() -> None:
    choice = post(FakeEngine("é"), CHAT, say(logprobs=True, top_logprobs=1)).json()["choices"][0]
    top = [{"token": "A", "logprob": -0.5, "bytes": [65]}]
    assert choice["logprobs"]["content"] == [
        {"token": "\ufffd", "logprob": -1.0, "bytes": [0xC3], "top_logprobs": top},
        {"token": "\ufffd", "logprob": -1.0, "bytes": [0xA9], "top_logprobs": top},
    ]
    assert bytes([0xC3, 0xA9]).decode() == choice["message"]["content"]


def test_log_probabilities_of_texts() -> None:
    choice = post(FakeEngine("bé"), TEXT, {"prompt": "xy", "logprobs": 1, "echo": True}).json()["choices"][0]
    assert choice["text"] == "xybé"
    assert choice["logprobs"] == {
        "tokens": ["x", "y", "b", "", "é"],
        "token_logprobs": [None, -1.0, -1.0, -1.0, -1.0],
        "top_logprobs": [
            None,
            {"y": -1.0, "A": -0.5},
            {"b": -1.0, "A": -0.5},
            {"bytes:\\xc3": -1.0, "A": -0.5},
            {"bytes:\\xa9": -1.0, "A": -0.5},
        ],
        "text_offset": [0, 1, 2, 3, 3],
    }


def test_log_probabilities_of_a_prompt() -> None:
    body = post(FakeEngine("b"), TEXT, {"prompt": "xy", "prompt_logprobs": 1, "max_tokens": 0}).json()
    assert body["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "121": {"logprob": -1.0, "rank": 2, "decoded_token": "y"},
            "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
        },
    ]
    assert body["choices"][0]["text"] == "" and body["usage"]["completion_tokens"] == 0


def test_token_ids_in_and_out() -> None:
    choice = post(FakeEngine("b"), TEXT, {"prompt": [120, START], "return_token_ids": True}).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"], choice["text"]) == ([120, START], [98, END], "b")
    body = post(FakeEngine("b"), TEXT, {"prompt": "x", "logprobs": 0, "return_tokens_as_token_ids": True}).json()
    assert body["choices"][0]["logprobs"]["tokens"] == ["token_id:98", f"token_id:{END}"]
    body = post(FakeEngine("b"), CHAT, say(return_token_ids=True)).json()
    assert body["choices"][0]["token_ids"] == [98, END]
    assert bytes(i for i in body["prompt_token_ids"] if i < 256) == b"user:hi\nassistant:"


def test_the_best_of_several_are_chosen_by_their_probability() -> None:
    engine = FakeEngine("b")
    body = post(engine, TEXT, {"prompt": "x", "n": 2, "best_of": 5}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert engine.params[0].n == 5 and engine.params[0].logprobs == 0
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 10, "all that were made are counted"


def test_every_answer_is_in_the_document() -> None:
    document = make_app(FakeEngine()).openapi()
    for path in (CHAT, TEXT, "/v1/models", "/v1/models/{name}", "/tokenize", "/detokenize", "/health", "/ready"):
        for operation in document["paths"][path].values():
            schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
            assert "$ref" in schema, path
    assert {"/version", "/load", "/server/decisions"} <= set(document["paths"])


def test_models_are_listed_under_all_their_names() -> None:
    names = ("org/one", "two")
    body = get(FakeEngine(), "/v1/models", served_model_name=names).json()
    assert [card["id"] for card in body["data"]] == ["org/one", "two"]
    card = get(FakeEngine(), "/v1/models/org/one", served_model_name=names).json()
    assert (card["id"], card["root"], card["max_model_len"]) == ("org/one", "fake/model", 256)
    assert post(FakeEngine(), CHAT, say(model="two"), served_model_name=names).json()["model"] == "two"
    assert post(FakeEngine(), CHAT, say(), served_model_name=names).json()["model"] == "org/one"


def test_tokens_there_and_back() -> None:
    body = post(FakeEngine(), "/tokenize", {"prompt": "hé<s>", "return_token_strs": True}).json()
    assert body == {
        "count": 4,
        "max_model_len": 256,
        "tokens": [104, 0xC3, 0xA9, START],
        "token_strs": ["h", "Ã", "©", "<s>"],
    }
    assert post(FakeEngine(), "/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": "hé<s>"}
    found = post(FakeEngine(), "/tokenize", {"messages": [{"role": "user", "content": "a"}]}).json()
    assert bytes(i for i in found["tokens"] if i < 256) == b"user:a\nassistant:" and "token_strs" not in found


def test_the_state_of_the_server() -> None:
    engine = FakeEngine()
    assert get(engine, "/health").json() == {"status": "ok"}
    assert get(engine, "/ready").json() == {"status": "ok"}
    assert get(engine, "/load").json() == {"server_load": 2, "running": 0, "waiting": 2}
    assert set(get(engine, "/version").json()) == {"version"}
    engine.is_running = False
    for path in ("/health", "/ready"):
        response = get(engine, path)
        assert (response.status_code, response.json()) == (503, {"status": "dead"})


def test_decisions_are_shown_on_request_only() -> None:
    hidden = get(FakeEngine(), "/server/decisions")
    assert hidden.status_code == 404 and "--expose-decisions" in hidden.json()["error"]["message"]
    assert get(FakeEngine(), "/server/decisions", expose_decisions=True).json() == {"decisions": ["chosen"]}
